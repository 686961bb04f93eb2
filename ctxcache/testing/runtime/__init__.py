"""A small runtime without a model, for tests: it drives a coordinator and checks every byte that it reads."""

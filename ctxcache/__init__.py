"""A context cache coordinator for LLM runtimes, on Numba-CUDA."""

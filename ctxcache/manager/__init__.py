"""The manager: which page holds what, who uses it, what goes first. May import `keys` and what lies below; knows no CUDA."""

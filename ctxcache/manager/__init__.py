"""The manager: which page holds what, who uses it, what goes first. Knows no CUDA.

May import `arguments`, `config`, `errors`, `ids`, `jit`, `metrics`.
"""

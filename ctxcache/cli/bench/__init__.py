"""The benchmarks: `host/` times the host's work, `device/` the ops on a GPU.

May import `cli.report`.
"""

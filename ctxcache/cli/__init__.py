"""The command line: `ctxcache`, also `python -m ctxcache`."""

from ctxcache.cli.main import main

__all__ = ["main"]

"""`ctxcache bench device`: the ops on a GPU and what a runtime would write instead. Needs a CUDA target.

May import `cli`, `cli.bench`, `config`, `device`, `errors`, `ids`.
"""

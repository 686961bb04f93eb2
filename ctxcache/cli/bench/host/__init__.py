"""`ctxcache bench host`: what is timed, where it begins, and the bounds; no device and no CUDA target.

May import `arguments`, `cli`, `cli.bench`, `config`, `coordinator`, `device`, `errors`, `fsm`, `ids`, `keys`, `manager`,
`request`.
"""

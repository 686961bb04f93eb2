"""A small runtime around a model without weights: it drives a coordinator and checks every byte that it reads.

Deployments of every kind (`deployments`), a model that knows what must lie where (`model`, `work`), the steps of a request on
any device ops (`steps`), the same on a lazy stream that may fail (`runtime`), whole requests (`scripts`).

May import `arguments`, `config`, `coordinator`, `device`, `errors`, `ids`, `keys`, `manager`, `request`, `testing`.
"""

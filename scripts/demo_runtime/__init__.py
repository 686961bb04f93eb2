"""A small language model runtime in NumPy: the worked example of how a runtime uses `ctxcache`.

`conversation` is the part to read: every operation of the coordinator in the order in which a runtime calls it.
`paged` shows who owns the pools and how attention follows the page table; `model` and `tokenizer` are an ordinary
llama and its byte-level BPE, written small; `report` prints.
"""

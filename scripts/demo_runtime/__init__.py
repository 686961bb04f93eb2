"""A small language model runtime in NumPy: the worked example of how a runtime uses `ctxcache`.

Read `conversation` first: every operation of the coordinator, in the order in which a runtime calls it. `runtime` puts a
runtime together, and says who owns which memory; `paged` follows the page table; `tiles` explains why everything here
can be compared bit for bit.

The rest is an ordinary llama (`model`, `attention`, `gguf_file`, `tokenizer`), a small model with state-space layers
(`hybrid_model`), and the two jobs of `./scripts/demo` (`main_job`, `hybrid_job`), which `harness` runs with and without
the cache and `report` prints.
"""

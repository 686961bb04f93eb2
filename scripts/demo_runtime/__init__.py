"""A small language model runtime in NumPy: the worked example of how a runtime uses `ctxcache`.

Read `conversation` first: every operation of the coordinator, in the order in which a runtime calls it. `runtime` puts a
runtime together, and says who owns which memory; `paged` follows the page table; `tiles` explains why everything here
can be compared bit for bit.

`speculative` is the same story with drafts: `drafters` proposes, `eagle` is a draft model with pages of its own, and
`engine` is one model's memory as a coordinator borrows it.

The rest is an ordinary llama (`model`, `attention`, `gguf_file`, `tokenizer`), a small model with state-space layers
(`hybrid_model`), and the three jobs of `./scripts/demo` (`main_job`, `hybrid_job`, `speculative_job`), which `harness` and
`speculative_harness` run with and without the cache and `report` prints.
"""

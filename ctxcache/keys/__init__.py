"""Keys of content: what identifies a block and an exact prefix. May import `errors`, `ids`, `jit` and `arguments`; knows no cache."""

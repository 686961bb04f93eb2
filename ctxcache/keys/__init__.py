"""Keys of content: what identifies a block and an exact prefix. Knows no cache.

May import `arguments`, `config`, `errors`, `ids`, `jit`.
"""

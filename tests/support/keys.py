"""Keys as values that compare, what they are made of at random, and the golden ones."""

from __future__ import annotations

from hypothesis import strategies as st

from ctxcache.ids import Hash128
from ctxcache.keys.chain import hash_exact_prefix, hash_full_blocks
from ctxcache.keys.identity import AdapterKey, BlockKeyExtras, MediaSpanKey, hash_opaque_identity

KEY = bytes(range(16))
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NONE = Hash128(0, 0)
M1, M2, M3 = (hash_opaque_identity(name) for name in ("picture 1", "picture 2", "picture 3"))


def run_of(length: int, first: int = 1) -> list[int]:
    """Tokens `first, first + 1, ...`."""
    return list(range(first, first + length))


def keys_of(tokens, tokens_per_page=128, extras=BlockKeyExtras(), media=None, key=KEY) -> list[Hash128]:  # noqa: B008
    """Keys of the full blocks as values that compare and hash."""
    rows = hash_full_blocks(tokens, tokens_per_page, extras, media, key=key)
    return [Hash128(int(hi), int(lo)) for hi, lo in rows]


def exact_key_of(tokens, tokens_per_page=128, extras=BlockKeyExtras(), media=None, key=KEY) -> Hash128:  # noqa: B008
    """Exact key of all tokens."""
    return hash_exact_prefix(tokens, tokens_per_page, extras, media, key=key)


TOKENS = st.integers(INT32_MIN, INT32_MAX)
DIGESTS = st.builds(Hash128, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
SPANS = st.builds(
    MediaSpanKey,
    DIGESTS,
    DIGESTS,
    st.integers(0, 200),
    st.integers(0, 9),
    st.one_of(st.integers(0, 9), st.text(max_size=5)),
)
EXTRAS = st.builds(
    BlockKeyExtras,
    st.lists(SPANS, max_size=2),
    st.none() | st.builds(AdapterKey, DIGESTS, st.integers(0, 5)),
    st.none() | DIGESTS,
    st.none() | DIGESTS,
    st.none() | DIGESTS,
)


@st.composite
def sequences(draw, min_size=0):
    """Tokens, page size, extras and per-position media (`None`, or sparse digests)."""
    tokens = draw(st.lists(TOKENS, min_size=min_size, max_size=70))
    spans = st.lists(st.just(NONE) | DIGESTS, min_size=len(tokens), max_size=len(tokens))
    sparse = st.lists(st.just(NONE), min_size=len(tokens), max_size=len(tokens))
    return tokens, draw(st.integers(1, 9)), draw(EXTRAS), draw(st.none() | sparse | spans)


GOLDEN_EXTRAS = BlockKeyExtras(
    media=(MediaSpanKey(M1, M2, 3, 0, "image"), MediaSpanKey(M2, M1, 7, 1, 4)),
    adapter=AdapterKey(hash_opaque_identity("adapter"), 7),
    position_digest=Hash128(1, 2),
    custom_embedding_digest=Hash128(0, 0),
    isolation_digest=hash_opaque_identity("tenant"),
)


def golden_keys() -> list[str]:
    """Keys of fixed inputs under a fixed key, as text."""
    media = [M1 if 3 <= index < 9 else NONE for index in range(40)]
    return [
        *map(str, keys_of(run_of(256))),
        str(exact_key_of(run_of(130))),
        *map(str, keys_of(run_of(40, first=-20), 16, GOLDEN_EXTRAS, media)),
        str(exact_key_of(run_of(40, first=-20), 16, GOLDEN_EXTRAS, media)),
        str(exact_key_of([], 16)),
    ]

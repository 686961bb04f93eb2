"""SipHash itself, plain and compiled, against published digests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keys import KEY
from support.siphash_twin import siphash_2_4_128

from ctxcache.keys.siphash import hash_bytes, initial_state

# The reference implementation's vectors_sip128, key 00..0f over 00, 01, ...; the later ones from OpenSSL 3.0.
PUBLISHED = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    63: "5150d1772f50834a503e069a973fbd7c",
}


@pytest.mark.parametrize("length", PUBLISHED)
def test_the_twin_is_siphash_2_4_128(length):
    """The plain-Python hash that everything else is compared with gives the published digests."""
    assert siphash_2_4_128(KEY, bytes(range(length))).hex() == PUBLISHED[length]


@given(key=st.binary(min_size=16, max_size=16), message=st.binary(max_size=300))
def test_the_compiled_hash_of_bytes_is_siphash(key, message):
    """Compiled SipHash equals the plain one for every key and every length, those beyond 255 bytes included."""
    digest = np.empty(2, dtype=np.uint64)
    hash_bytes(initial_state(key), np.frombuffer(message, dtype=np.uint8), digest)
    assert digest.astype("<u8").tobytes() == siphash_2_4_128(key, message)

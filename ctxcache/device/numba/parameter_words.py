"""Values that travel as a launch's own parameters: the driver copies them in the call, so no buffer has to keep them.

A kernel that takes a run of int32 values has two last parameters for it: the address of the values, and `INLINE_WORDS` int64
words with two values each, which it reads where the address is null. Short runs need no staging buffer, no copy and no mark then,
which are three driver calls of four.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INLINE_WORDS = 48
"""int64 parameters that carry values; sixteen snapshot jobs fill them. A kernel finds one of them by a tree of comparisons, six
deep, which grows with their number; parameters altogether may take 4 KiB."""

INLINE_INTS = 2 * INLINE_WORDS
"""int32 values that fit."""

NO_WORDS = np.empty(0, np.int64)
"""What is passed where the values are in memory."""


def as_words(values: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return C-contiguous int32 values, two to an int64 word, the first of two in its low half (hosts and GPUs are little-endian).

    The words are the same memory where the values are even in number.
    """
    flat = values.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.int32(0))
    return flat.view(np.int64)

"""The kernels, and nothing else: while one runs under the simulator, this module's `cuda` is replaced.

All parameters are int64: addresses, counts, and byte numbers; `words` are a fixed number of them, see
`ctxcache.device.numba.parameter_words`. Along x the threads of a grid share the work on one run of bytes; y counts the runs of a table and z
the jobs. Every loop strides over the grid, so any grid gives the same result.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from ctxcache.device.numba.context import cuda
from ctxcache.device.numba.descriptor_tables import (
    MOVE_FIELDS,
    MOVE_FIXED_BYTES,
    MOVE_LIVE_ADDRESS,
    MOVE_LIVE_FIELD,
    MOVE_LIVE_STRIDE,
    MOVE_SAVED_ADDRESS,
    MOVE_SAVED_FIELD,
    MOVE_SAVED_STRIDE,
    MOVE_TOKEN_BYTES,
    POOL_ADDRESS,
    POOL_FIELDS,
    POOL_HALF_BYTES,
    POOL_PAGE_BYTES,
    SLOT_ADDRESS,
    SLOT_BYTES,
    SLOT_FIELDS,
)
from ctxcache.device.numba.loads_stores import load1, load4, load8, load16, store1, store4, store16, wrapped
from ctxcache.device.ops import JOB_TOKENS
from ctxcache.device.page_sums import FIRST_FACTOR, SECOND_FACTOR, SUM_LANES


@cuda.jit(device=True, inline="always")
def copy_words16(target: int, source: int, num_words: int, first: int, step: int) -> None:
    """Copy 16-byte words; both addresses are multiples of 16. Thread `first` of `step` threads."""
    i = first
    # Four loads in flight before the first store: the memory's latency is what limits a copy.
    while i + 3 * step < num_words:
        a = load16(source + 16 * i)
        b = load16(source + 16 * (i + step))
        c = load16(source + 16 * (i + 2 * step))
        d = load16(source + 16 * (i + 3 * step))
        store16(target + 16 * i, a)
        store16(target + 16 * (i + step), b)
        store16(target + 16 * (i + 2 * step), c)
        store16(target + 16 * (i + 3 * step), d)
        i += 4 * step
    while i < num_words:
        store16(target + 16 * i, load16(source + 16 * i))
        i += step


@cuda.jit(device=True, inline="always")
def copy_bytes(target: int, source: int, num_bytes: int, first: int, step: int) -> None:
    """Copy bytes between places that do not overlap, in the widest words that both addresses allow."""
    head = num_bytes
    body = 0
    if ((target - source) & 15) == 0:
        head = min((-source) & 15, num_bytes)
        words = (num_bytes - head) >> 4
        body = words << 4
        copy_words16(target + head, source + head, words, first, step)
    elif ((target - source) & 3) == 0:
        head = min((-source) & 3, num_bytes)
        words = (num_bytes - head) >> 2
        body = words << 2
        for i in range(first, words, step):
            store4(target + head + 4 * i, load4(source + head + 4 * i))
    for i in range(first, num_bytes - body, step):
        offset = i if i < head else i + body
        store1(target + offset, load1(source + offset))


@cuda.jit(device=True, inline="always")
def zero_bytes(target: int, num_bytes: int, first: int, step: int) -> None:
    """Fill bytes with zeros."""
    head = min((-target) & 15, num_bytes)
    words = (num_bytes - head) >> 4
    body = words << 4
    for i in range(first, words, step):
        store16(target + head + 16 * i, (0, 0))
    for i in range(first, num_bytes - body, step):
        store1(target + (i if i < head else i + body), 0)


@cuda.jit(device=True, inline="always")
def value_at(address: int, words: tuple[int, ...], i: int) -> int:
    """Return entry i of a run of int32 values: from memory, or where its address is null from the launch's own words."""
    if address != 0:
        return load4(address + 4 * i)
    word = words[i >> 1]
    return wrapped(word << (0 if (i & 1) != 0 else 32)) >> 32


@cuda.jit
def scatter_page_ids(view: int, entries: int, num_entries: int, width: int, num_pages: int) -> None:
    """Write changed page-table entries, `(row * width + column, page id)` int32 each, to K and V half of the view."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, num_entries, cuda.gridDim.x * cuda.blockDim.x):
        position = load4(entries + 8 * i)
        page = load4(entries + 8 * i + 4)
        # Row r of the view is 2 * width entries: position r * width + c becomes 2 * r * width + c.
        key = view + 4 * (position + position // width * width)
        store4(key, page)
        store4(key + 4 * width, page + num_pages if page >= 0 else page)


@cuda.jit
def write_ints(target: int, num_targets: int, num_values: int, values: int, words: tuple[int, ...]) -> None:
    """Write `num_values` int32, and zero the targets behind them up to `num_targets`."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, num_targets, cuda.gridDim.x * cuda.blockDim.x):
        store4(target + 4 * i, value_at(values, words, i) if i < num_values else 0)


@cuda.jit
def add_ints(target: int, increments: int, increment: int, num_values: int) -> None:
    """Add to int32 values: `increment`, and where `increments` is not null its entry too."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(first, num_values, cuda.gridDim.x * cuda.blockDim.x):
        added = increment
        if increments != 0:
            added += load4(increments + 4 * i)
        store4(target + 4 * i, load4(target + 4 * i) + added)


@cuda.jit
def copy_run(target: int, source: int, num_bytes: int) -> None:
    """Copy one run of bytes."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    copy_bytes(target, source, num_bytes, first, cuda.gridDim.x * cuda.blockDim.x)


@cuda.jit
def zero_slots(table: int, num_rows: int, num_slots: int, slots: int, words: tuple[int, ...]) -> None:
    """Fill the given slots (int32) of every array of a slot table with zeros."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for i in range(cuda.blockIdx.z, num_slots, cuda.gridDim.z):
        slot = value_at(slots, words, i)
        for row in range(cuda.blockIdx.y, num_rows, cuda.gridDim.y):
            entry = table + 8 * SLOT_FIELDS * row
            num_bytes = load8(entry + 8 * SLOT_BYTES)
            zero_bytes(load8(entry + 8 * SLOT_ADDRESS) + slot * num_bytes, num_bytes, first, step)


@cuda.jit
def move_snapshots(table: int, num_rows: int, restoring: int, num_jobs: int, jobs: int, words: tuple[int, ...]) -> None:
    """Copy the runs of a move table for every job: live to saved, or saved to live when `restoring` is not 0."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for i in range(cuda.blockIdx.z, num_jobs, cuda.gridDim.z):
        num_tokens = value_at(jobs, words, JOB_TOKENS * num_jobs + i)
        for row in range(cuda.blockIdx.y, num_rows, cuda.gridDim.y):
            move = table + 8 * MOVE_FIELDS * row
            live_index = value_at(jobs, words, load8(move + 8 * MOVE_LIVE_FIELD) * num_jobs + i)
            saved_index = value_at(jobs, words, load8(move + 8 * MOVE_SAVED_FIELD) * num_jobs + i)
            if live_index >= 0 and saved_index >= 0:
                live = load8(move + 8 * MOVE_LIVE_ADDRESS) + live_index * load8(move + 8 * MOVE_LIVE_STRIDE)
                saved = load8(move + 8 * MOVE_SAVED_ADDRESS) + saved_index * load8(move + 8 * MOVE_SAVED_STRIDE)
                num_bytes = load8(move + 8 * MOVE_FIXED_BYTES) + num_tokens * load8(move + 8 * MOVE_TOKEN_BYTES)
                if restoring != 0:
                    copy_bytes(live, saved, num_bytes, first, step)
                else:
                    copy_bytes(saved, live, num_bytes, first, step)


@cuda.jit
def compact_slots(table: int, num_rows: int, mapping: int, old_batch: int) -> None:
    """Move slot i of every array of a slot table to slot mapping[i], in place; -1 retires a slot.

    Why overlapping moves are safe. Call the bytes at one offset of all slots a column, of 1, 4 or 16 bytes. A thread
    takes whole columns and no two threads share one, so nothing that one thread reads is written by another, and
    no order between threads, blocks or warps matters. Within a column the thread walks the old slots in rising
    order. The map keeps the order of the survivors and fills 0 .. n-1, so mapping[i] <= i: step i reads slot i and
    writes slot mapping[i] <= i. All later steps read slots above i. Hence no step writes what a later step reads,
    and each step reads the original value: those are program order within one thread, which the machine keeps.

    A column has the same width in every slot because it is chosen from the slot's size, and every slot begins at
    the same alignment then. An entry that points upwards cannot be in such a map; it is passed over rather than
    written out of bounds.
    """
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for row in range(cuda.blockIdx.y, num_rows, cuda.gridDim.y):
        entry = table + 8 * SLOT_FIELDS * row
        base = load8(entry + 8 * SLOT_ADDRESS)
        num_bytes = load8(entry + 8 * SLOT_BYTES)
        width = 1
        if (num_bytes & 15) == 0:
            width = 16
        elif (num_bytes & 3) == 0:
            width = 4
        # Columns: first the wide ones behind the unaligned head, then the single bytes of head and tail.
        head = min((-base) & (width - 1), num_bytes)
        num_wide = (num_bytes - head) // width
        body = num_wide * width
        num_columns = num_wide + num_bytes - body
        for column in range(first, num_columns, step):
            offset = head + column * width
            if column >= num_wide:
                byte = column - num_wide
                offset = byte if byte < head else byte + body
            for old in range(old_batch):
                new = load4(mapping + 4 * old)
                if 0 <= new < old:
                    source = base + old * num_bytes + offset
                    target = base + new * num_bytes + offset
                    if column >= num_wide or width == 1:
                        store1(target, load1(source))
                    elif width == 4:
                        store4(target, load4(source))
                    else:
                        store16(target, load16(source))


@cuda.jit(device=True, inline="always")
def load_piece(address: int, num_bytes: int) -> tuple[int, int]:
    """Load up to 16 bytes at any address as two 64-bit words, with zeros behind `num_bytes`."""
    low = 0
    high = 0
    for i in range(min(num_bytes, 8)):
        low |= load1(address + i) << 8 * i
    for i in range(8, min(num_bytes, 16)):
        high |= load1(address + i) << 8 * i - 64
    return low, high


@cuda.jit(device=True, inline="always")
def add_unit(total: int, factor: int, words: tuple[int, int]) -> int:
    """Take one unit of a page into a sum."""
    return wrapped((total * factor + words[0]) * factor + words[1])


@cuda.jit
def sum_pages(table: int, num_rows: int, sums: int, num_pages: int, page_ids: int, words: tuple[int, ...]) -> None:
    """Sum pages, each layer by itself; `ctxcache.device.page_sums` defines the sum. A thread takes whole lanes."""
    first = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    step = cuda.gridDim.x * cuda.blockDim.x
    for entry in range(cuda.blockIdx.z, num_pages, cuda.gridDim.z):
        page = value_at(page_ids, words, entry)
        for row in range(cuda.blockIdx.y, num_rows, cuda.gridDim.y):
            layer = table + 8 * POOL_FIELDS * row
            page_bytes = load8(layer + 8 * POOL_PAGE_BYTES)
            keys = load8(layer + 8 * POOL_ADDRESS) + page * page_bytes
            half_bytes = load8(layer + 8 * POOL_HALF_BYTES)
            num_units = (page_bytes + 15) // 16
            for lane in range(first, SUM_LANES, step):
                one = 0
                two = 0
                for half in range(2 if lane < num_units else 0):
                    base = keys + half * half_bytes
                    num_whole = page_bytes // 16 if (base & 15) == 0 else 0
                    i = lane
                    # Four loads in flight before the first is used, as where words are copied.
                    while i + 3 * SUM_LANES < num_whole:
                        a = load16(base + 16 * i)
                        b = load16(base + 16 * (i + SUM_LANES))
                        c = load16(base + 16 * (i + 2 * SUM_LANES))
                        d = load16(base + 16 * (i + 3 * SUM_LANES))
                        one = add_unit(add_unit(one, FIRST_FACTOR, a), FIRST_FACTOR, b)
                        one = add_unit(add_unit(one, FIRST_FACTOR, c), FIRST_FACTOR, d)
                        two = add_unit(add_unit(two, SECOND_FACTOR, a), SECOND_FACTOR, b)
                        two = add_unit(add_unit(two, SECOND_FACTOR, c), SECOND_FACTOR, d)
                        i += 4 * SUM_LANES
                    while i < num_units:
                        at = base + 16 * i
                        unit = load16(at) if i < num_whole else load_piece(at, page_bytes - 16 * i)
                        one = add_unit(one, FIRST_FACTOR, unit)
                        two = add_unit(two, SECOND_FACTOR, unit)
                        i += SUM_LANES
                store16(sums + 16 * ((entry * num_rows + row) * SUM_LANES + lane), (one, two))

"""Prepared launches do what Numba's dispatch does, and tell the driver what they were told."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.device import (
    another_stream,
    build_rig,
    even_engine,
    hybrid_engine,
    ints,
    jobs,
    mtp_deployment,
    stream_of_run,
)

from ctxcache.device.compiled_checks import are_sound_jobs
from ctxcache.device.numba.driver_calls import DriverCalls, PreparedKernel
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.op_checks import check_jobs
from ctxcache.device.ops import SnapshotJobs
from ctxcache.errors import ContractError, DeviceError

OUT_OF_RESOURCES = 701
NOT_READY = 600


class FakeApi:
    """The driver's calls, recorded; a launch reads its arguments as the driver does, through pointers."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=NOT_READY)
    CUstream = CUfunction = int

    def __init__(self) -> None:
        self.num_arguments = 0
        self.launches: list[tuple[Any, ...]] = []
        self.answer = 0

    def cuLaunchKernel(self, function: int, *rest: int) -> tuple[int]:  # noqa: N802 - the driver's name
        """Record grid, block, shared memory, stream and the values behind the pointers."""
        *sizes, parameters, extra = rest
        pointers = (ctypes.c_void_p * self.num_arguments).from_address(parameters)
        values = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        self.launches.append((function, tuple(sizes), values, extra))
        return (self.answer,)

    def cuEventQuery(self, event: int) -> tuple[int]:  # noqa: N802 - the driver's name
        """Answer what the test wants."""
        del event
        return (self.answer,)


def test_the_driver_finds_every_argument_where_it_looks() -> None:
    """Grid, block, stream and each 64-bit argument reach the driver as given, launch after launch."""
    api = FakeApi()
    api.num_arguments = 3
    kernel = PreparedKernel(DriverCalls(api), 77, 3)
    kernel.launch((5, 6, 7), 128, 9, (1, -2, 2**62))
    kernel.launch((1, 1, 1), 32, 0, (0, 0, -(2**63)))
    assert api.launches == [
        (77, (5, 6, 7, 128, 1, 1, 0, 9), [1, -2, 2**62], 0),
        (77, (1, 1, 1, 32, 1, 1, 0, 0), [0, 0, -(2**63)], 0),
    ]


def test_words_follow_the_arguments() -> None:
    """Those that are given are where the driver looks, behind the others; a launch without any leaves the others right."""
    api = FakeApi()
    api.num_arguments = 5
    kernel = PreparedKernel(DriverCalls(api), 77, 2, 3)
    kernel.launch((1, 1, 1), 32, 0, (1, 2), np.array([-3, 4, 5]))
    kernel.launch((1, 1, 1), 32, 0, (6, 7), np.array([8]))
    kernel.launch((1, 1, 1), 32, 0, (9, 10))
    assert [values for _, _, values, _ in api.launches] == [[1, 2, -3, 4, 5], [6, 7, 8, 4, 5], [9, 10, 8, 4, 5]]
    with pytest.raises(ValueError, match="broadcast"):
        kernel.launch((1, 1, 1), 32, 0, (1, 2), np.arange(4))
    assert len(api.launches) == 3


def test_arguments_that_do_not_fit_are_not_launched() -> None:
    """Too many, too few, too large: an error before the driver is called."""
    api = FakeApi()
    kernel = PreparedKernel(DriverCalls(api), 1, 2)
    for arguments in ((1,), (1, 2, 3), (1, 2**63), (1, 1.5)):
        with pytest.raises(Exception, match=r"argument|expected|range|requires?"):
            kernel.launch((1, 1, 1), 1, 0, arguments)  # type: ignore[arg-type]
    assert api.launches == []


def test_the_drivers_refusal_is_a_device_error() -> None:
    """A code other than success raises with the code; not-ready is an answer to a query and to nothing else."""
    api = FakeApi()
    driver = DriverCalls(api)
    kernel = PreparedKernel(driver, 1, 0)
    api.answer = OUT_OF_RESOURCES
    with pytest.raises(DeviceError, match=str(OUT_OF_RESOURCES)):
        kernel.launch((1, 1, 1), 1, 0, ())
    with pytest.raises(DeviceError, match=str(OUT_OF_RESOURCES)):
        driver.has_passed(1)
    api.answer = NOT_READY
    assert not driver.has_passed(1)
    api.answer = 0
    assert driver.has_passed(1)


def test_streams_do_not_pile_up() -> None:
    """A runtime that makes a stream a request keeps a bounded number of the driver's objects alive."""
    driver = DriverCalls(FakeApi())
    assert [driver.stream(handle) for handle in range(1, 3000)] == list(range(1, 3000))
    assert driver.stream(7) == 7
    assert len(driver._streams) <= 1024


def test_threads_do_not_mix_their_arguments() -> None:
    """Two threads that launch the same kernel get each launch whole."""
    api = FakeApi()
    api.num_arguments = 4
    kernel = PreparedKernel(DriverCalls(api), 1, 2, 2)

    def work(value: int) -> None:
        for _ in range(500):
            kernel.launch((1, 1, 1), 1, 0, (value,) * 2, np.full(2, value))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values for _, _, values, _ in api.launches) == [[v] * 4 for v in range(4) for _ in range(500)]


def test_a_launch_inside_a_launch_leaves_both_whole() -> None:
    """A finaliser or signal handler that launches the same kernel neither waits for the launch it interrupts nor spoils it."""
    api = FakeApi()
    api.num_arguments = 3
    kernel = PreparedKernel(DriverCalls(api), 1, 2, 1)

    class Interrupted:
        """An argument that is read only after the first has been put in place."""

        def __index__(self) -> int:
            kernel.launch((1, 1, 1), 1, 0, (7, 8), np.array([9]))
            return 2

    for _ in range(2):
        kernel.launch((1, 1, 1), 1, 0, (1, Interrupted()), np.array([3]))  # type: ignore[arg-type]
    assert [values for _, _, values, _ in api.launches] == [[7, 8, 9], [1, 2, 3]] * 2


def test_compiled_and_described_compiled_checks_agree() -> None:
    """Whatever the jobs: the compiled check says no exactly where the slow one has something to say."""
    rig = build_rig(NumbaDeviceOps(), mtp_deployment(hybrid_engine("bfloat16")))
    hybrid = build_rig(NumbaDeviceOps(), hybrid_engine())
    rng = np.random.default_rng(11)
    refused = 0
    for turn in range(3000):
        storage = (rig, hybrid)[turn % 2].storage
        fields = [rng.integers(-1 - (rng.random() < 0.1), high, 2) for high in (4, 5, 4, 8, 10, 9)]
        batch = SnapshotJobs(*(field.astype(np.int32) for field in fields))
        for to_snapshots in (False, True):
            try:
                packed = check_jobs(storage, batch, to_snapshots=to_snapshots)
            except ContractError:
                refused += 1
            else:
                np.testing.assert_array_equal(packed, fields)
    assert 1000 < refused < 5900
    assert are_sound_jobs(np.empty((6, 0), np.int32), (1,) * 6, True)


@pytest.mark.parametrize("sharing", ["streams_apart", "one_stream"])
def test_threads_use_one_ops_at_once(sharing: str) -> None:
    """Each with its own arrays, on a GPU and under the simulator; what all need of a cache is made once."""
    ops = NumbaDeviceOps()
    rig = build_rig(ops, even_engine(), num_bytes=1 << 16)
    targets = [ops.allocate((64,), "int32") for _ in range(3)]
    streams = [stream_of_run() if sharing == "one_stream" else another_stream() for _ in range(3)]
    start = threading.Barrier(3)

    def work(number: int) -> None:
        stream = streams[number]
        start.wait()
        for turn in range(10):
            ops.upload_mapping(np.full(64, 100 * number + turn, np.int32), targets[number], stream)
            ops.zero_recurrent(rig.base, ints(number), stream)
            ops.synchronize(stream, None)
            assert (ops.to_host(targets[number]) == 100 * number + turn).all()

    with ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(work, number) for number in range(3)]:
            result.result()
    assert len(ops._slot_tables) == 1


@pytest.mark.gpu
def test_both_ways_of_launching_agree() -> None:
    """A seeded run of every op ends in the same bytes, launched through handles and by Numba's dispatch."""
    images, launches = [], []
    for prepared in (True, False):
        ops = NumbaDeviceOps(prepared_launches=prepared)
        rig = build_rig(ops, mtp_deployment(even_engine()), skew=1)
        stream = stream_of_run()
        mapping = ops.allocate((3,), "int32")
        rig.ops.fill(5)
        for seed in range(6):
            rng = np.random.default_rng(seed)
            slots, states, partials, pages, drafts = (rng.permutation(n)[:2] for n in (3, 4, 3, 7, 9))
            rows = jobs(*zip(slots, states, partials, pages, drafts, rng.integers(0, 8, 2), strict=True))
            (rig.ops.capture if seed % 2 else rig.ops.restore)(rig.storage, rows, stream)
            rig.ops.upload_mapping(ints(*[(-1, 0, 1), (0, -1, 1), (0, 1, -1)][seed % 3]), mapping, stream)
            rig.ops.compact_slot_state(rig.base, mapping, 3, 2, stream)
            rig.ops.zero_recurrent(rig.base, ints(2), stream)
            rig.ops.reset_lengths(rig.base, ints(*rng.integers(0, 14, 3)), stream)
            rig.ops.advance_lengths(rig.base, 3, stream)
        rig.synchronize()
        images.append(rig.ops.image())
        launches.append((ops.num_launches, ops.num_prepared_launches))
    np.testing.assert_array_equal(*images)
    assert launches[0] == (launches[1][0], launches[1][0])
    assert launches[1][1] == 0

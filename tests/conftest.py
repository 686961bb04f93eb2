"""What every test needs before the first import of Numba, and what running on a real GPU takes.

`pytest --gpu-stream KIND` (see `support.gpu`) runs on a GPU, on that kind of stream; without it kernels are simulated.
"""

from __future__ import annotations

import os

import pytest

# Read by Numba when it is first imported, so it must be set here. `NUMBA_ENABLE_CUDASIM=0 pytest` runs on a GPU.
os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

pytest_plugins = ("ctxcache_pytest", "support.sampling")  # the first where the package is not installed
"""The package's own fixtures, and how much of the suite a run takes."""

SKIP_ON_GPU = {
    "test_finalisers_of_a_forked_child_do_nothing": "CUDA does not survive a fork; the library does not touch it there",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of GPU runs."""
    group = parser.getgroup("gpu")
    group.addoption("--gpu-stream", choices=["numba", "external", "per-thread"], help="run the tests on such a stream")
    group.addoption("--gpu-spin-ms", type=float, default=50.0, help="how long a stream is busy before each operation")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the suite; with `--gpu-stream`, let the coordinator's tests run on the GPU's ops."""
    config.addinivalue_line("markers", "gpu: needs a real GPU; skipped under the simulator")
    config.addinivalue_line("markers", "alone: measures time, or takes minutes: runs while nothing else uses the GPU")
    kind = config.getoption("--gpu-stream")
    if kind is None:
        return
    from support.device import RUN
    from support.gpu import StreamedOps, make_stream, spin

    import ctxcache

    StreamedOps.stream = make_stream(kind)
    StreamedOps.spin_ms = config.getoption("--gpu-spin-ms")
    RUN.stream = StreamedOps.stream
    RUN.make_stream = lambda: make_stream(kind)
    RUN.occupy = lambda: spin(StreamedOps.stream, StreamedOps.spin_ms)
    # Before a test module imports it: where a test asks for ops of the host, it gets the GPU's.
    ctxcache.NumpyDeviceOps = StreamedOps  # type: ignore[misc,assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a real GPU while kernels are simulated, and the other way round."""
    simulated = os.environ["NUMBA_ENABLE_CUDASIM"] == "1"
    for item in items:
        if simulated and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="kernels are simulated; run with NUMBA_ENABLE_CUDASIM=0 on a GPU"))
        why = SKIP_ON_GPU.get(getattr(item, "originalname", item.name))
        if why is not None and config.getoption("--gpu-stream"):
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many operations found their stream busy."""
    kind = config.getoption("--gpu-stream")
    if kind is not None:
        from support.gpu import StreamedOps

        terminalreporter.write_line(
            f"stream: {kind} ({StreamedOps.stream!r}); {StreamedOps.num_spins} coordinator operations behind a spin of "
            f"{StreamedOps.spin_ms:g} ms"
        )

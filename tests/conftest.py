"""What every test needs before the first import of Numba."""

from __future__ import annotations

import os

import pytest

# Read by Numba when it is first imported, so it must be set here. `NUMBA_ENABLE_CUDASIM=0 pytest` runs on a GPU.
os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the suite."""
    config.addinivalue_line("markers", "gpu: needs a real GPU; skipped under the simulator")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real GPU while kernels are simulated."""
    if os.environ["NUMBA_ENABLE_CUDASIM"] != "1":
        return
    skip = pytest.mark.skip(reason="kernels are simulated; run with NUMBA_ENABLE_CUDASIM=0 on a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

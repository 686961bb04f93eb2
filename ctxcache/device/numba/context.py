"""The CUDA target, the driver's own calls, and the device that ops belong to.

A thread begins without a context, and other libraries change which one is current. What enqueues or waits in another device's
context fails at best: the default stream's handle is 0 on every device, and a wait for it there would prove nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from numba import config, cuda

from ctxcache.device.numba.driver_calls import DriverCalls
from ctxcache.errors import DeploymentError

__all__ = ["SIMULATED", "CudaDevice", "cuda", "missing_target"]

_Result = TypeVar("_Result")

SIMULATED = bool(config.ENABLE_CUDASIM)
"""Whether kernels run under Numba's simulator, on host memory."""


def missing_target() -> str | None:
    """Say why kernels cannot run here, or `None` when they can: on a GPU with numba-cuda, or simulated."""
    if SIMULATED:
        return None
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    if not cuda.is_available():
        return " ".join(str(cuda.cuda_error() or "the driver finds no device").split())
    return None


class CudaDevice:
    """One GPU, by its primary context: the device that is current in the thread that makes this.

    Everything that belongs to the device is made and used inside `current()`, in whichever thread, or where its cost counts
    and interrupts are likely, by `call()`. The simulator has one device and no contexts.

    Attributes:
        ordinal: the device's number among those that the process sees.

    Raises:
        DeploymentError: a context is current that is not the device's primary one.
    """

    def __init__(self) -> None:
        self.ordinal = 0
        self._driver: Any = None
        if SIMULATED:
            return
        try:
            cuda.current_context()
        except RuntimeError as error:
            raise DeploymentError(
                f"{error}; make the primary context of the device current (as PyTorch and CuPy do) before ops are constructed"
            ) from error
        self._driver = _load_driver()
        self._api = self._driver.api
        self._context = self._driver.value(self._api.cuCtxGetCurrent())
        self._handle = int(self._context)
        self.ordinal = int(self._driver.value(self._api.cuCtxGetDevice()))
        self._set_current = self._api.cuCtxSetCurrent

    def _displaced(self) -> Any:
        """Return the context that has to make way for this device's and be put back; `None` where this one is current.

        Where none is, this one becomes current, and stays: CUDA's own runtime does the same.
        """
        if SIMULATED:
            return None
        before = self._driver.value(self._api.cuCtxGetCurrent())
        handle = int(before)
        if handle == self._handle:
            return None
        if handle:
            return before
        self.enter()
        return None

    def enter(self) -> None:
        """Make this device's context the calling thread's."""
        self._driver.check(self._set_current(self._context))

    def call(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return what a call returns that has the device's context current.

        As `current()`, but without a generator: faster, and no interrupt finds a gap in it.
        """
        before = self._displaced()
        try:
            if before is not None:
                self.enter()
            return work(*arguments)
        finally:
            if before is not None:
                self._set_current(before)

    @contextmanager
    def current(self) -> Iterator[DriverCalls]:
        """Have the device's context current inside the block, which is given the driver's calls; `None` when simulated."""
        before = self._displaced()
        try:
            if before is not None:
                self.enter()
            yield self._driver
        finally:
            if before is not None:
                self._set_current(before)


@lru_cache(maxsize=1)
def _load_driver() -> DriverCalls:
    from cuda.bindings import driver  # noqa: PLC0415 - comes with numba-cuda, is not there under the simulator

    return DriverCalls(driver)

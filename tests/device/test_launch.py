"""What `launch` asks of Numba and of the driver where kernels run on a GPU, which a lazy fake stands in for."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_cuda import FakeCuda, FakeDriver

from ctxcache.device.arrays import view_array
from ctxcache.device.numba import context, device_memory, launch
from ctxcache.device.numba.context import CudaDevice
from ctxcache.device.numba.parameter_words import INLINE_WORDS
from ctxcache.errors import DeploymentError, DeviceError

OUT_OF_MEMORY = 2


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU, as far as `launch` can see."""
    fake = FakeCuda(FakeDriver())
    for module in (context, device_memory, launch):
        monkeypatch.setattr(module, "SIMULATED", False)
        monkeypatch.setattr(module, "cuda", fake)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake.driver))
    context._load_driver.cache_clear()
    yield fake
    context._load_driver.cache_clear()


class Kernel:
    """A kernel of Numba's: compiled for a signature, or configured by a subscript."""

    def __init__(self, handle: Any = 77, *, takes_words: bool = False) -> None:
        self.handle = handle
        self.py_func = (lambda count, values, words: None) if takes_words else (lambda *_integers: None)
        self.compiled: list[Any] = []
        self.configured: list[Any] = []
        self.called: list[Any] = []

    def compile(self, signature: tuple[Any, ...]) -> Any:
        """Compile; this release may keep the handle elsewhere."""
        self.compiled.append(signature)
        if self.handle is None:
            return SimpleNamespace()
        library = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=self.handle))
        return SimpleNamespace(_codelibrary=library)

    def __getitem__(self, configuration: Any) -> Any:
        self.configured.append(configuration)
        return lambda *arguments: self.called.append((configuration, arguments))


def test_what_is_missing_is_named(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing with a GPU; the package where it is absent; the driver's own reason on one line otherwise."""
    found: dict[str, Any] = {"numba_cuda": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    assert context.missing_target() is None
    cuda.available = False
    assert context.missing_target() == "the driver is asleep"
    found.clear()
    assert context.missing_target() == "numba-cuda is not installed"


def test_a_kernel_is_compiled_once_and_launched_through_its_handle(cuda: FakeCuda) -> None:
    """All parameters are int64; grid and stream reach the driver; Numba's dispatch is not asked."""
    launcher, kernel = launch.Launcher(), Kernel()
    launcher.launch(kernel, (1, 2, 3), None, 5, 6)
    launcher.launch(kernel, (4, 1, 1), 99, 7, 8)
    assert [len(signature) for signature in kernel.compiled] == [2]
    assert cuda.driver.launches == [(77, (1, 2, 3), 0), (77, (4, 1, 1), 99)]
    assert kernel.configured == []
    assert (launcher.num_launches, launcher.num_prepared_launches) == (2, 2)
    assert cuda.num_contexts == 1


@pytest.mark.parametrize(("prepared", "handle"), [(True, None), (True, "no number"), (False, 77)])
def test_without_a_handle_numbas_dispatch_launches(cuda: FakeCuda, prepared: bool, handle: Any) -> None:
    """The kernel is configured once for each grid and stream, and compiled for its handle at most once."""
    launcher, kernel = launch.Launcher(prepared=prepared), Kernel(handle)
    for stream in (99, 99, None, 99):
        launcher.launch(kernel, (1, 1, 1), stream, 5)
    assert len(kernel.compiled) == int(prepared)
    assert [configuration[2].handle for configuration in kernel.configured] == [99, 0]
    assert [configuration[2].handle for configuration, _ in kernel.called] == [99, 99, 0, 99]
    assert all(arguments == (5,) for _, arguments in kernel.called)
    assert cuda.driver.launches == []
    assert (launcher.num_launches, launcher.num_prepared_launches) == (4, 0)


def test_configurations_do_not_pile_up(cuda: FakeCuda) -> None:
    """Whatever number of grids is asked for, a bounded number of configured kernels is kept."""
    launcher, kernel = launch.Launcher(prepared=False), Kernel()
    for x in range(3000):
        launcher.launch(kernel, (x + 1, 1, 1), None)
    assert len(kernel.called) == 3000
    assert len(launcher._configured) <= 1024


def test_a_stream_of_numbas_is_made_once_for_each_handle(cuda: FakeCuda) -> None:
    """Handle 0 is the default stream."""
    launcher = launch.Launcher()
    mine = launcher.numba_stream(99)
    assert (mine.handle, launcher.numba_stream(99)) == (99, mine)
    assert launcher.numba_stream(None).handle == 0


def test_memory_is_zero_and_copies_have_arrived(cuda: FakeCuda) -> None:
    """Each of allocate, write and read returns when the device is through with it; what is empty is not copied."""
    memory = device_memory.DeviceMemory(CudaDevice())
    array = memory.allocate((2, 3), np.dtype(np.int32))
    view = view_array(array.host)
    assert not array.host.any()
    memory.write(view, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert array.host.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert memory.read(view).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cuda.driver.num_calls == 3
    empty = memory.allocate((0, 3), np.dtype(np.int32))
    memory.write(view_array(empty.host), np.empty((0, 3), np.int32))
    assert memory.read(view_array(empty.host)).shape == (0, 3)
    assert cuda.driver.num_calls == 3


def test_a_copy_that_the_driver_refuses_is_a_device_error(cuda: FakeCuda) -> None:
    """The driver's code is in the message."""
    cuda.driver.answer = OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"answered {OUT_OF_MEMORY}"):
        device_memory.DeviceMemory(CudaDevice()).allocate((2,), np.dtype(np.int32))


def test_a_staging_buffer_is_idle_behind_its_mark(cuda: FakeCuda) -> None:
    """The copy to the device is enqueued, not waited for; the buffer is busy from its mark to when that is passed."""
    buffer = device_memory.StagingBuffer(64, CudaDevice())
    assert buffer.address == buffer.host.ctypes.data
    assert buffer.is_idle()
    buffer.host[:] = np.arange(64)
    address = buffer.copy_to_device(64, 99)
    assert buffer.copy_to_device(8, 99) == address
    buffer.mark_used(99)
    assert not buffer.is_idle()
    assert buffer._beside.host[0] == 0x5A
    buffer.wait()
    assert buffer.is_idle()
    assert buffer._beside.host.tolist() == list(range(64))


@pytest.mark.parametrize("prepared", [True, False])
def test_words_follow_the_integers(cuda: FakeCuda, prepared: bool) -> None:
    """A kernel that takes words is compiled for a tuple of them; Numba's dispatch is given all, zeros behind the first."""
    launcher, kernel = launch.Launcher(prepared=prepared), Kernel(takes_words=True)
    assert launch.takes_words(kernel)
    assert not launch.takes_words(Kernel())
    launcher.launch(kernel, (1, 1, 1), 99, 5, 0, words=np.array([7, -8]))
    if prepared:
        assert [str(kind) for kind in kernel.compiled[0]] == ["int64", "int64", f"UniTuple(int64 x {INLINE_WORDS})"]
        assert cuda.driver.launches == [(77, (1, 1, 1), 99)]
    else:
        ((_, arguments),) = kernel.called
        assert arguments == (5, 0, (7, -8, *[0] * (INLINE_WORDS - 2)))


def test_ops_stay_on_the_device_they_were_made_on(cuda: FakeCuda) -> None:
    """Launches, copies, marks and waits are made in that device's context, in whichever thread, and leave the thread's own."""
    driver = cuda.driver
    driver.context = driver.CONTEXTS + 1
    device = CudaDevice()
    launcher, memory = launch.Launcher(device), device_memory.DeviceMemory(device)
    assert device.ordinal == 1
    buffer = device_memory.StagingBuffer(64, device)
    found = []

    def work(context_before: int) -> None:
        driver.context = context_before
        launcher.launch(Kernel(), (1, 1, 1), None)
        array = memory.allocate((3,), np.dtype(np.int32))
        memory.write(view_array(array.host), np.arange(3, dtype=np.int32))
        assert memory.read(view_array(array.host)).tolist() == [0, 1, 2]
        buffer.copy_to_device(8, 99)
        buffer.mark_used(99)
        buffer.is_idle()
        buffer.wait()
        assert launcher.synchronize(None) is None
        assert launcher.synchronize(99, lambda stream: stream + driver.context) == 99 + driver.CONTEXTS + 1
        found.append(driver.context)

    for before in (driver.CONTEXTS, driver.CONTEXTS + 1, driver.CONTEXTS + 2, 0):
        thread = threading.Thread(target=work, args=(before,))
        thread.start()
        thread.join()
    assert found == [driver.CONTEXTS, driver.CONTEXTS + 1, driver.CONTEXTS + 2, driver.CONTEXTS + 1]
    calls = {"launch": 1, "memory, each with its wait": 3 * 2, "copy": 1, "mark": 1, "question": 1, "waits": 2}
    assert driver.devices == [1] * (len(found) * sum(calls.values()))


def test_a_context_is_put_back_after_a_failure(cuda: FakeCuda) -> None:
    """A launch that the driver refuses, or a synchroniser that raises, does not leave the thread on another device."""
    driver = cuda.driver
    launcher = launch.Launcher()
    launcher.launch(kernel := Kernel(), (1, 1, 1), None)
    driver.context = driver.CONTEXTS + 1
    driver.answer = OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"answered {OUT_OF_MEMORY}"):
        launcher.launch(kernel, (1, 1, 1), None)
    assert driver.context == driver.CONTEXTS + 1
    with pytest.raises(ZeroDivisionError):
        launcher.synchronize(None, lambda stream: 1 // 0)
    assert driver.context == driver.CONTEXTS + 1


@pytest.mark.parametrize("at", ["cuCtxSetCurrent", "cuLaunchKernel", "the synchroniser"])
def test_an_interrupt_leaves_the_threads_context(cuda: FakeCuda, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes with a driver's call, after its effect: the context that was current is current again."""
    driver, kernel = cuda.driver, Kernel()

    def interrupted(name: str) -> Any:
        call, times = getattr(driver, name), iter([True])

        def work(*arguments: Any) -> Any:
            answer = call(*arguments)
            if armed and next(times, False):
                raise KeyboardInterrupt
            return answer

        return work

    armed: list[bool] = []
    for name in ("cuCtxSetCurrent", "cuLaunchKernel"):
        if at == name:
            monkeypatch.setattr(driver, name, interrupted(name))
    launcher = launch.Launcher()
    launcher.launch(kernel, (1, 1, 1), None)
    driver.context = driver.CONTEXTS + 1
    armed.append(True)

    def interrupt(_stream: Any) -> None:
        raise KeyboardInterrupt

    works = {"the synchroniser": lambda: launcher.synchronize(None, interrupt)}
    with pytest.raises(KeyboardInterrupt):
        works.get(at, lambda: launcher.launch(kernel, (1, 1, 1), None))()
    assert driver.context == driver.CONTEXTS + 1


def test_a_context_that_is_not_the_primary_one_is_refused(cuda: FakeCuda) -> None:
    """Numba cannot work in it; the caller hears what to do."""

    def refuse() -> None:
        raise RuntimeError("Numba cannot operate on non-primary CUDA context 7")

    cuda.current_context = refuse  # type: ignore[method-assign]
    with pytest.raises(DeploymentError, match="non-primary CUDA context 7; make the primary context"):
        CudaDevice()


def test_a_thread_waits_for_the_stream_that_it_copied_on(cuda: FakeCuda) -> None:
    """Where two threads make the first copy at once, each makes a stream, and waits for its own."""
    memory, made = device_memory.DeviceMemory(CudaDevice()), []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle
            self.waits = 0

        def synchronize(self) -> None:
            self.waits += 1
            cuda.driver.run()

    def make() -> Stream:
        stream = Stream(0x9000 + len(made))
        made.append(stream)
        if stream is made[0]:  # another thread is faster
            memory.allocate((3,), np.dtype(np.int32))
        return stream

    cuda.stream = make  # type: ignore[method-assign]
    assert not memory.allocate((3,), np.dtype(np.int32)).host.any()
    assert [stream.waits for stream in made] == [1, 1]

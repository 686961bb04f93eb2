"""`njit` for the package: nogil, cached on disk where that is possible, and never stale.

Numba's own cache looks at the file of the outermost function only, so an edited callee in another file goes
unnoticed. Here the stamp covers every module that compiled code can have functions or constants from: those of the whole
package but its two top floors, which nothing below imports, and those of the function's own folder. Where neither the package folder nor the home folder can be written, functions
are compiled in memory instead of failing at import. The first function of a process that no cache has is told to the log,
since many follow it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LOG = logging.getLogger("ctxcache")

_DISPATCHERS: list[Any] = []


class MachineCode(NamedTuple):
    """How many functions, each once for every kind of arguments, have machine code in this process.

    Attributes:
        compiled: compiled here.
        loaded: read from the cache on disk.
    """

    compiled: int
    loaded: int


def machine_code() -> MachineCode:
    """Count the package's functions that have machine code by now."""
    loaded = sum(sum(dispatcher.stats.cache_hits.values()) for dispatcher in _DISPATCHERS)
    return MachineCode(sum(len(dispatcher.overloads) for dispatcher in _DISPATCHERS) - loaded, loaded)


_PACKAGE = Path(__file__).parent
_TOP_FLOORS = ("cli", "testing")


@cache
def _package_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    below = (inner for inner in _PACKAGE.iterdir() if inner.is_dir() and inner.name not in _TOP_FLOORS)
    modules = {*_PACKAGE.glob("*.py"), *folder.glob("*.py")}.union(*(inner.rglob("*.py") for inner in below))
    stats = sorted((os.path.relpath(module, folder), module.stat()) for module in modules)
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@cache
def _announce() -> None:
    _LOG.info(
        "Numba compiles, for about a minute in all; `ctxcache warmup` does that beforehand, and keeps the code on disk"
    )


class _NoCache(NullCache):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """No cache; Numba asks it before it compiles."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        del sig, target_context
        _announce()


class _PackageCache(FunctionCache):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """Numba's function cache, stamped with all modules of the package instead of the function's own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call,unused-ignore]
        stamp = _package_stamp(Path(function.__code__.co_filename).parent)
        self._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call,unused-ignore]
            cache_path=self._cache_path, filename_base=self._impl.filename_base, source_stamp=stamp
        )
        # Numba looks at the version before it reads the rest, which may name types that the package no longer has.
        self._cache_file._version = (numba.__version__, stamp)  # noqa: SLF001 - see above

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call,unused-ignore]
        if found is None:
            _announce()
        return found


def njit(function: _Function) -> _Function:
    """Compile `function` at its first call, without the GIL; compiled code is kept on disk when it can be."""
    return _cached(function, numba.njit(nogil=True)(function))


def njit_in_place(function: _Function) -> _Function:
    """As `njit`, for code that only works on arrays that it is given.

    Nothing is reference-counted, which is most of the cost of short calls that pass many arrays; and what would
    allocate does not compile, so such code cannot run out of memory halfway.
    """
    return _cached(function, numba.njit(nogil=True, _nrt=False)(function))


def njit_part(function: _Function) -> _Function:
    """As `njit_in_place`, for a part of other compiled code that Python never calls.

    It gets no wrapper that takes Python objects apart, which is a third of the time that compilation takes.
    """
    return _cached(
        function, numba.njit(nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    )


def njit_inlined(function: _Function) -> _Function:
    """As `njit_in_place`, and compiled into its compiled callers, as LLVM would not do by itself.

    For what is called once a record or block: passing all the arrays of a structure takes longer than such a call does.
    """
    return _cached(function, numba.njit(nogil=True, _nrt=False, forceinline=True)(function))


def _cached(function: _Function, dispatcher: Any) -> _Function:
    _DISPATCHERS.append(dispatcher)
    dispatcher._cache = _NoCache()  # noqa: SLF001 - what numba's enable_caching() assigns
    with suppress(RuntimeError):  # numba: no writable place for the cache
        dispatcher._cache = _PackageCache(function)  # noqa: SLF001 - see above
    return cast("_Function", dispatcher)

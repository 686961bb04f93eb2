"""The errors of the library, one class for each party that has to act.

The caller mends a `ContractError` or a `DeploymentError`; the operator looks at a `DeviceError`, a
`RequestFailedError` or a `PoisonedError`; an `InvariantError` is a fault of this library.
"""

from __future__ import annotations


class ContextCacheError(Exception):
    """Base of every error that the library raises on purpose."""


class ContractError(ContextCacheError, ValueError):
    """The caller broke the contract of an operation. Nothing has changed; the corrected call works."""


class DeploymentError(ContextCacheError, ValueError):
    """A configuration that cannot be served. Raised while objects are constructed, never later."""


class RequestFailedError(ContextCacheError, RuntimeError):
    """A request could not get the capacity it needs, or another request is active."""


class PoisonedError(ContextCacheError, RuntimeError):
    """A drain failed: leases are quarantined until `shutdown()` proves the device idle."""


class DeviceError(ContextCacheError, RuntimeError):
    """A device operation failed while it was being enqueued; `__cause__` is the original exception.

    The request can still be finished or abandoned; both drain the stream before they release anything.
    """


class PageCorruptionError(ContextCacheError, RuntimeError):
    """The page sanitizer found that a shared page has changed since its publication: the runtime wrote into it.

    The request can still be finished or abandoned. What is cached cannot be trusted; `clear()` it.
    """


class InvariantError(ContextCacheError, AssertionError):
    """The library contradicts itself. Please report it with the message and the log."""

"""The end of a coordinator that nobody shut down: garbage-collected, or still there when the interpreter exits."""

from __future__ import annotations

import logging
import os
from typing import Any

from ctxcache.request.owner import Custody

_LOG = logging.getLogger("ctxcache")

_UNPROVEN: list[Any] = []
"""What a device may still write. It is kept for the rest of the process: freed memory could become somebody else's."""


def end_of_life(custody: Custody, resources: Any) -> None:
    """Abandon the active request and shut down. Lets nothing escape; does nothing in a forked child.

    Args:
        custody: the coordinator's custody; it outlives the coordinator for this call.
        resources: kept referenced when the device could not be proven idle.
    """
    if custody.pid != os.getpid():
        return
    try:
        close(custody, resources)
    except BaseException:  # noqa: BLE001 - nothing may escape from a finaliser
        _LOG.exception("a coordinator could not be shut down cleanly")
        _UNPROVEN.append((custody, resources))


def close(custody: Custody, resources: Any) -> None:
    """Abandon the active request and shut down; a device that cannot be proven idle keeps its resources."""
    if custody.shut:
        return
    custody.run("abandon", custody.abandon_active)
    custody.run("shutdown", custody.shutdown)
    if not custody.shut:
        _LOG.error("shut down without a proof that the device is idle: its caches and page tables are never freed")
        _UNPROVEN.append((custody, resources))

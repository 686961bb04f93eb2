"""Listening to a manager: what it is told and what it answers, without its knowledge."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def tap(
    manager: Any,
    method: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Let functions hear every later call of one method of one manager.

    Args:
        manager: whose calls are heard; taps on one method stack, the latest outermost.
        method: the method's name.
        before: called with the arguments.
        after: called with the result and then the arguments; not called when the method raised.
    """
    call = getattr(manager, method)

    @wraps(call)
    def tapped(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        result = call(*arguments, **options)
        if after is not None:
            after(result, *arguments, **options)
        return result

    setattr(manager, method, tapped)

"""Checks of what callers pass to tables, caches and storages: types before values, so that every refusal is in words.

`as_index` is for operations, where a mistake is a `ContractError`; the rest are for constructors, where it is a
`DeploymentError`. Arrays are checked where they are read: `ctxcache.device.ops.as_int32s`, `ctxcache.device.arrays`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ctxcache.config import DeploymentConfig, EngineConfig
from ctxcache.errors import ContractError, DeploymentError


def as_index(name: str, value: int | np.integer[Any], limit: int, rule: str = "it must be in") -> int:
    """Return a whole number in [0, limit): a slot, a row, or a count below `limit`.

    Args:
        name: what the number is.
        value: the number.
        limit: what it must be below.
        rule: the refusal's words before the range.

    Raises:
        ContractError: another type (a bool is no number), or out of range.
    """
    if type(value) is not int:
        if not _is_integer(value):
            raise ContractError(f"{name} is {_said(value)}; pass an integer, {rule} 0 .. {limit - 1}")
        value = int(value)
    if not 0 <= value < limit:
        raise ContractError(f"{name} is {value}; {rule} 0 .. {limit - 1}")
    return value


def as_size(name: str, value: int, least: int, most: int) -> int:
    """Return a whole number in [least, most]: what something is built with.

    Raises:
        DeploymentError: another type (a bool is no number), or out of range.
    """
    if not _is_integer(value):
        raise DeploymentError(f"{name} is {_said(value)}; give an integer, {least} .. {most}")
    if not least <= value <= most:
        raise DeploymentError(f"{name} is {value}; it must be in {least} .. {most}")
    return int(value)


def check_engine(name: str, value: EngineConfig) -> None:
    """Check that something is the geometry of one engine; `DeploymentError` otherwise."""
    if not isinstance(value, EngineConfig):
        raise DeploymentError(f"{name} is {_said(value)}; give an EngineConfig")


def check_engine_or_deployment(name: str, value: EngineConfig | DeploymentConfig) -> None:
    """Check that something is an engine or a whole deployment; `DeploymentError` otherwise."""
    if not isinstance(value, (EngineConfig, DeploymentConfig)):
        raise DeploymentError(f"{name} is {_said(value)}; give an EngineConfig or a DeploymentConfig")


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the arrays that are lent, one a layer, as a list; `DeploymentError` for what is no run."""
    try:
        return list(iter(values))
    except TypeError:
        raise DeploymentError(f"{name} is {_said(values)}; lend a run with one array a layer") from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _said(value: Any) -> str:
    """Say what a wrong value is: an array by its layout, anything else as it shows itself."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)

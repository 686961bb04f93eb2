"""What tables, caches and storages are built from is of the right type, or a `DeploymentError` says what to give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ctxcache.arguments import describe
from ctxcache.config import DeploymentConfig, EngineConfig
from ctxcache.errors import DeploymentError


def check_engine(name: str, value: EngineConfig) -> None:
    """Check that something is the geometry of one engine; `DeploymentError` otherwise."""
    if not isinstance(value, EngineConfig):
        raise DeploymentError(f"{name} is {describe(value)}; give an EngineConfig")


def check_engine_or_deployment(name: str, value: EngineConfig | DeploymentConfig) -> None:
    """Check that something is an engine or a whole deployment; `DeploymentError` otherwise."""
    if not isinstance(value, (EngineConfig, DeploymentConfig)):
        raise DeploymentError(f"{name} is {describe(value)}; give an EngineConfig or a DeploymentConfig")


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the arrays that are lent, one a layer, as a list; `DeploymentError` for what is no run."""
    try:
        return list(iter(values))
    except TypeError:
        raise DeploymentError(f"{name} is {describe(values)}; lend a run with one array a layer") from None

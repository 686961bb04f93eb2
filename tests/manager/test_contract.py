"""Both managers are what `CacheManager` says, to the names, kinds and defaults of parameters."""

from __future__ import annotations

import inspect

import pytest

from ctxcache.manager.manager import ContextCacheManager
from ctxcache.testing import ReferenceManager
from ctxcache.testing.manager_contract import CacheManager, RecordsView

PROMISED = sorted(name for name in vars(CacheManager) if not name.startswith("_"))


def signature_of(kind: type, name: str) -> list[tuple[str, object, object]]:
    """Name, kind and default of every parameter."""
    parameters = inspect.signature(getattr(kind, name)).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


@pytest.mark.parametrize("manager", [ContextCacheManager, ReferenceManager], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", PROMISED)
def test_a_manager_takes_what_the_interface_says(manager: type, name: str) -> None:
    """Every method has the promised parameters, every property is one."""
    promised = vars(CacheManager)[name]
    if isinstance(promised, property):
        assert isinstance(inspect.getattr_static(manager, name), property)
        return
    assert signature_of(manager, name) == signature_of(CacheManager, name)


@pytest.mark.parametrize("name", PROMISED)
def test_the_contract_stands_on_the_class_that_users_call(name: str) -> None:
    """`help(ContextCacheManager.acquire)` says it all: every promised name is explained there, and sends nobody elsewhere."""
    said = inspect.getdoc(inspect.getattr_static(ContextCacheManager, name)) or ""
    assert said
    assert "See `" not in said
    if name in {
        "plan",
        "acquire",
        "grow",
        "grow_leases",
        "publish",
        "reserve_snapshots",
        "publish_checkpoint",
        "release",
    }:
        assert "Raises:" in said


@pytest.mark.parametrize("manager", [ContextCacheManager, ReferenceManager], ids=lambda kind: kind.__name__)
def test_records_are_counted_and_walked(manager: type) -> None:
    """An empty view has length 0 and nothing to walk, in both."""
    records: RecordsView = manager(tokens_per_page=4, num_base_pages=3).records
    assert (len(records), list(records)) == (0, [])

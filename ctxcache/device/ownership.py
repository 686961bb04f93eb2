"""Who may use a table or a pool: at most one live coordinator at a time."""

from __future__ import annotations

import weakref
from typing import Any

from ctxcache.errors import ContractError


class Ownership:
    """A resource's knowledge of the coordinator that it is bound to. The coordinator is not kept alive.

    A bound owner that has been garbage-collected no longer counts; one that was shut down calls `unbind`.
    """

    _owner: weakref.ReferenceType[Any] | None = None

    @property
    def owner(self) -> Any:
        """The live coordinator that this resource is bound to, or `None`."""
        return None if self._owner is None else self._owner()

    def bind(self, owner: Any) -> None:
        """Bind this resource to `owner`. Binding again to the same owner changes nothing.

        Raises:
            ContractError: it is bound to another live owner.
        """
        present = self.owner
        if present is not None and present is not owner:
            raise ContractError(
                f"this {type(self).__name__} belongs to another coordinator; a resource serves one live coordinator, "
                "so shut that one down first or allocate another"
            )
        self._owner = weakref.ref(owner)

    def unbind(self, owner: Any) -> None:
        """End the binding to `owner`. Nothing happens when the resource is bound to nobody or to somebody else."""
        if self.owner is owner:
            self._owner = None

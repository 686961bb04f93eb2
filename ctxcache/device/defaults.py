"""Which device ops a resource gets when its maker named none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxcache.errors import DeploymentError

if TYPE_CHECKING:
    from ctxcache.device.ops import RuntimeDeviceOps


def ops_or_default(device_ops: RuntimeDeviceOps | None) -> RuntimeDeviceOps:
    """Return the given ops, or a new `NumbaDeviceOps()`.

    Raises:
        DeploymentError: none were given and there is neither a GPU nor the simulator; or what was given allocates nothing.
    """
    if device_ops is not None:
        if not callable(getattr(device_ops, "allocate", None)):
            raise DeploymentError(
                f"device_ops is {device_ops!r}; pass an object with the methods of DeviceOps, or None"
            )
        return device_ops
    # Imported here: whoever brings ops of their own needs no CUDA target at all.
    from ctxcache.device.numba.ops import NumbaDeviceOps  # noqa: PLC0415

    return NumbaDeviceOps()

"""The device package imports anywhere; only `NumbaDeviceOps()` needs a target, and says how to get one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
remedy, hide = sys.argv[1:]
if hide:
    sys.modules[hide] = None
import ctxcache.device
from ctxcache.config import EngineConfig, AttentionLayerConfig
from ctxcache.device.kv_pools import HybridCacheManager
from ctxcache.device.numba.ops import NumbaDeviceOps
from ctxcache.device.numpy_ops import NumpyDeviceOps
from ctxcache.device.page_table import KVPageTable
from ctxcache.device.resources import check_resources
from ctxcache.device.snapshots import HybridSnapshotStorage
from ctxcache.errors import DeploymentError
from ctxcache.ids import LayerType

assert "numba.cuda" not in sys.modules, "importing the package imported numba.cuda"
engine = EngineConfig(layers=(LayerType.ATTENTION,), attention=(AttentionLayerConfig(1, 8),))
table = KVPageTable(1, 2, 4, device_ops=NumpyDeviceOps())
table.set_row(0, [3])
table.upload(None)
HybridCacheManager(engine, None, device_ops=NumpyDeviceOps())
for construct in (
    NumbaDeviceOps,
    lambda: KVPageTable(1, 2, 4),
    lambda: HybridCacheManager(engine, None),
    lambda: HybridCacheManager.from_arrays(engine, kv_pools=[], stream=None),
):
    try:
        construct()
    except DeploymentError as error:
        assert remedy in str(error), error
        assert ("pip install" in str(error)) is bool(hide), error
        assert "export NUMBA_ENABLE_CUDASIM=1" in str(error), error
        assert "\\n" not in str(error), error
    else:
        raise AssertionError("constructed without a target")
print("all said")
"""


@pytest.mark.parametrize(
    ("remedy", "hidden"), [("nvidia-smi", ""), ("pip install '.[gpu]' in ctxcache's repository", "numba_cuda")]
)
def test_without_gpu_and_simulator_only_numba_ops_refuse(remedy: str, hidden: str) -> None:
    """Import, page tables, pools and NumPy ops work; what needs kernels names the simulator, and the part that is missing."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": "", "NUMBA_DISABLE_CUDA": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, remedy, hidden],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "all said"

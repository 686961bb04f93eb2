"""The device side: page tables, pools, snapshots and the ops that move their bytes.

Importing this package needs neither a GPU nor the simulator: `numba.cuda` is imported when the first
`NumbaDeviceOps` is constructed.
"""

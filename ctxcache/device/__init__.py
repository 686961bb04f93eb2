"""The device side: page tables, pools, snapshots and the ops that move their bytes.

From the ground up: arrays, streams and ownership; the seam, `ops`, with what an op may look at; the checks of what ops are
told; rows and sums of pages; the ops on kernels (`numba/`) and on the host; tables, pools and snapshots, which use them;
the resources of a coordinator.

Importing this package needs neither a GPU nor the simulator: `numba.cuda` is imported when the first
`NumbaDeviceOps` is constructed.

May import `arguments`, `config`, `errors`, `ids`, `jit`.
"""

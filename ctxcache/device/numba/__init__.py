"""Device work by `numba.cuda` kernels: the only place that imports `numba.cuda`.

From the ground up: the driver's calls, the CUDA context, memory, loads and stores, descriptor tables, kernels, their launch,
and the ops.

No module here is named `cuda...`: numba-cuda's import hook takes every name that contains `numba.cuda` for its own.

May import `arguments`, `device.arrays`, `device.op_checks`, `device.ops`, `device.page_sums`, `device.streams`,
`errors`.
"""

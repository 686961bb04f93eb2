"""Device work by `numba.cuda` kernels: the only place that imports `numba.cuda`.

From the ground up: the driver's calls, the CUDA context, memory, loads and stores, descriptor tables, kernels, their launch,
and the ops. May import what `device` has up to the checks of ops, and the definition of page sums; no table, pool or storage.

No module here is named `cuda...`: numba-cuda's import hook takes every name that contains `numba.cuda` for its own.
"""

"""Device work by `numba.cuda` kernels: the only place that imports `numba.cuda`. May import `device`'s seam and arrays."""

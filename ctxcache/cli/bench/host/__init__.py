"""`ctxcache bench host`: what is timed, where it begins, and the bounds; no device and no CUDA target."""

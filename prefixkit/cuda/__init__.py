"""The CUDA runtime: NVRTC, the cache of compiled kernels, launches, struct layouts, tensor maps."""

"""The ops by our CUDA kernels: planner, attention, KV, sampling, and the calibration of their costs."""

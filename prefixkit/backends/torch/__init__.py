"""The ops in plain torch: for CPUs, and for GPUs on which our kernels do not run."""

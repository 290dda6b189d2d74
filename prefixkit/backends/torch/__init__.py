"""The ops in plain torch: what runs on a CPU, and on a GPU that our kernels do not serve."""

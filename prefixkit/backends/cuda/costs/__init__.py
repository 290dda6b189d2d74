"""What attention costs on a GPU: measured by its own kernels, kept for each machine."""

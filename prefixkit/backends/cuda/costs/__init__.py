"""The costs of attention on a GPU: measured with its own kernels, and stored for each machine."""

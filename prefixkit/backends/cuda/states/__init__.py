"""Our kernels for layers that keep a state."""

"""Attention over latents by our kernels: plans of its two parts, K and V that are made, and the two parts merged."""

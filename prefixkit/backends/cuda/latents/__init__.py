"""Attention over latents by our kernels: plans of its two parts, K and V expanded, and the parts merged."""

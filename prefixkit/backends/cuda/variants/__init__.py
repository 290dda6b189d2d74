"""Variants of attention for our kernels: their text, their values, and the blocks that their masks hide."""

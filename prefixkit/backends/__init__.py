"""Implementations of the ops: plain torch, and our CUDA kernels."""

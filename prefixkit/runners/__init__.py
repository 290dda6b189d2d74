"""Runners of steps: eager, and CUDA graphs over static buffers."""

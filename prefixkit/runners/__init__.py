"""What launches decode steps: CUDA graphs over static buffers."""

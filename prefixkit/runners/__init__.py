"""What launches decode steps: CUDA graphs over arrays whose addresses stay."""

"""What a model computes with, and whether that has changed since KV was computed."""

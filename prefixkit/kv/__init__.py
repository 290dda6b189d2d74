"""KV of a model during and between calls: pools, stores, admission, memory limits, and prefix files."""

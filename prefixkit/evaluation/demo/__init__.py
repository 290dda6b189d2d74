"""A real model and real problems without a hub: what the demo, the examples and the benchmarks load."""

"""Tiny models, named and random trees, and checks of both: what tests, benchmarks and scripts share."""

"""Tiny models, named and random trees, and checks of both, shared by tests, benchmarks and scripts."""

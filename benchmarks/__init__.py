"""Benchmarks of prefixkit against floors and rivals; see README.md."""

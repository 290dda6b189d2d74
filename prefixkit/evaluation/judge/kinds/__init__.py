"""Judges by each kind of tests: streams, calls, checks, and an oracle."""

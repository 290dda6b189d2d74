"""Sampling: parameters, the specification of a draw, counter-based random numbers."""

"""Sampling: parameters, the specification of sampling, counter-based random numbers."""

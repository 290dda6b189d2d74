"""Indexers of sparse attention: which tokens each row of a step selects, and the keys by which it does."""

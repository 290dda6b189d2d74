"""Indexers of sparse attention: which tokens each row of a step selects, and the index keys used for that."""

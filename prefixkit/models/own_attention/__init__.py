"""Attention classes with code of their own, which no attention interface reaches: what runs in its place on a tree."""

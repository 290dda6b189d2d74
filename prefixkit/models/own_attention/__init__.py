"""Attention classes that bypass transformers' attention interface, and the code that replaces theirs on a tree."""

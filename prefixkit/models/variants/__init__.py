"""Variants of attention that users give to layers."""

"""Helpers for tests of the command line, of run folders and of their pages."""

"""Tracing: what a function does with proxies becomes an expression."""

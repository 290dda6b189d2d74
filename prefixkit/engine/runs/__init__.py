"""Runs of requests: samples and beam searches, and when they end."""

"""Prefix files: KV of prompts on disk."""

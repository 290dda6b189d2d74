"""KV of a model between and during calls: pools, stores, what fits them, their memory, and files of prefixes."""

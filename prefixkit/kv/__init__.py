"""KV of a model between and during calls: pools, stores, what fits them, how much memory they take, and files of prefixes."""

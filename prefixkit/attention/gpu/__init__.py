"""GPU planning policy: what attention costs on a GPU, tiles and KV splits, capacity of plans, and their uploads."""

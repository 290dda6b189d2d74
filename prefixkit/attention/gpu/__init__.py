"""GPU planning policy: cost models, tiles and KV splits, the capacity of plans, and uploads."""

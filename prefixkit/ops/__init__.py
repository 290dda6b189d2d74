"""Every op of prefixkit: schemas, fakes, argument checks, the KV pool, and the backend that runs them."""

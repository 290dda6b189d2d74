"""Every op of prefixkit: schemas, fakes, argument checks, and the backend that runs them."""

"""Heavy paths: consecutive nodes of a path are read as one KV list."""

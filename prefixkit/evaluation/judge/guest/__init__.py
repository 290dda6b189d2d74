"""Programs that run inside sandboxes; they get no further there than the standard library."""

"""Programs that run inside sandboxes, where only the standard library is available."""

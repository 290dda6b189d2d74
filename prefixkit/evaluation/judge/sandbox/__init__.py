"""Makes sandboxes, starts programs in them and talks with these; knows nothing of tests and verdicts."""

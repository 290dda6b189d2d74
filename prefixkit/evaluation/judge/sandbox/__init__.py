"""Makes sandboxes, starts programs in them and exchanges messages with them; independent of tests and verdicts."""

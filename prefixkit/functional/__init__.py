"""Tree, plan and attention as functions, for models of one's own: torch alone, no transformers."""

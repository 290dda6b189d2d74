"""The changes of a prefix tree: the steps of which each consists, and those that free pages or merge nodes."""

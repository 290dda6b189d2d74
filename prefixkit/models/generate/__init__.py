"""A patched model's own ``generate()`` on the tree."""

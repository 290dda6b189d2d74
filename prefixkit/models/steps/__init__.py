"""A patched model as the function that the loop calls: the cache of a step, and what runs it."""

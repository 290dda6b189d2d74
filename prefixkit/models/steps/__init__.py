"""A patched model as the function that the generation loop calls: the cache of a step, and the step's runner."""

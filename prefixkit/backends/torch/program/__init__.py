"""A plan as a program: tiles, the kernel calls that compute them, and how their results merge."""

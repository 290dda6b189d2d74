"""The loop: requests, scheduling, steps, sampling, beams, the report."""

"""Sampling campaigns: each has a run folder that can be resumed exactly, whatever stopped the run."""

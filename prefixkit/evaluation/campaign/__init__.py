"""Sampling campaigns: a run folder that is resumed exactly, whatever stopped it."""

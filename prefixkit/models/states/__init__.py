"""Layers that keep a state in place of KV: recurrent attention, state-space models, short convolutions."""

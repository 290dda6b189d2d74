"""Decoder layers through torch.compile: packed weights, rotary embedding joined with appending."""

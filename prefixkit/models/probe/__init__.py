"""What the attention layers of a model do, measured by two forward passes over four tokens."""

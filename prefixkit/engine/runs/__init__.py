"""What runs for a request: a sample or a beam search, and when it ends."""

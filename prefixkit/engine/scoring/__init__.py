"""Log-probabilities of given tokens, and values of a head; each token that texts share is computed once."""

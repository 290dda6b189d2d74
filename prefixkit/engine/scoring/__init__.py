"""Log-probabilities of given tokens, and values of a head: texts that are computed, each shared token once."""

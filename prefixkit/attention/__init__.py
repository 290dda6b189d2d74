"""Which numbers: formats, plan, pool, states, variants and ops of attention over a prefix tree."""

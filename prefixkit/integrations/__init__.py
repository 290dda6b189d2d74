"""Integrations of sessions into other tools: TRL, lm-evaluation-harness, xgrammar and llguidance."""

"""What attention over a prefix tree computes: queries, BSR formats, sharing, plans, variants and steps."""

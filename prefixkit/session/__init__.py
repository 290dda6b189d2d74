"""What users hold from call to call: sessions and search nodes; and what they ask, checked."""

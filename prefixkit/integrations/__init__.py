"""prefixkit under tools that people already use: one file each, on top of sessions."""

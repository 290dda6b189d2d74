"""Heavy paths: nodes that follow each other are read as one list."""

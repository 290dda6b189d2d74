"""The command line, run folders and their pages, as tests use them."""

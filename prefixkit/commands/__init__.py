"""What each command of the command line does; ``prefixkit.cli`` only parses."""

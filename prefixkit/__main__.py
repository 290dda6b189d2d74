"""``python -m prefixkit``: the command line."""

from prefixkit.cli.app import main

if __name__ == "__main__":
    main()

"""``prefixkit`` and ``python -m prefixkit``: the command line, where the packages that it needs are installed."""

import sys

from prefixkit.extras import MissingExtra, require

NEEDED = ("typer", "rich", "jinja2", "markupsafe")


def main() -> None:
    """Run the command line; exits with code 2 and the remedy where a package of its extra is missing."""
    try:
        for package in NEEDED:
            require(package, "campaign")
    except MissingExtra as error:
        print(f"prefixkit: the command line is an extra: {error}", file=sys.stderr)
        sys.exit(2)
    from prefixkit.cli.app import main as run

    run()


if __name__ == "__main__":
    main()

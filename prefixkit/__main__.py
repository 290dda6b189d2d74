"""``prefixkit`` and ``python -m prefixkit``: the command line, where the packages that it needs are installed."""

import atexit
import gc
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
    # torch and transformers make 400,000 objects that stay.  To look for garbage among them during imports, and once
    # more at the end of the process, takes a fifth to a third of a short command's time.
    gc.set_threshold(50_000, 10, 10)
    atexit.register(gc.freeze)
    from prefixkit.cli.app import main as run

    run()


if __name__ == "__main__":
    main()

"""Where downloads are kept, and how a file or folder gets there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixkit.paths import cache_dir as cache_dir


@contextmanager
def workspace() -> Iterator[Path]:
    """A private folder inside the cache (so that a rename out of it is atomic), removed afterwards."""
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    except OSError as error:
        raise OSError(f"cannot write to the cache folder {root} ({error.strerror}); set PREFIXKIT_CACHE") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(made: Path, final: Path) -> None:
    """Move a finished file or folder to its place.  When another process was first with a folder, its copy stays."""
    try:
        os.replace(made, final)
    except OSError:
        if not final.is_dir():
            raise

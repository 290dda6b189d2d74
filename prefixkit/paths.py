"""Where prefixkit keeps what it can make or fetch again, and how it writes there."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_dir(platform: str = sys.platform) -> Path:
    """The user's cache folder: ``$PREFIXKIT_CACHE``, or ``prefixkit`` in the platform's cache folder.

    Args:
        platform: As in ``sys.platform``.

    Raises:
        OSError: The system knows no home folder for the user, or for the one that ``$PREFIXKIT_CACHE`` names.
    """
    try:
        chosen = os.environ.get("PREFIXKIT_CACHE")
        return Path(chosen).expanduser() if chosen else _platform_cache(platform) / "prefixkit"
    except RuntimeError as error:  # pathlib's, where it looks for a home folder
        raise OSError(
            f"no place for the cache ({error}); set PREFIXKIT_CACHE to a folder that can be written"
        ) from error


def _platform_cache(platform: str) -> Path:
    if platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def put(place: Path, content: bytes) -> None:
    """Write a file so that a concurrent reader meets the whole of it, or what was there before.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".making-", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise

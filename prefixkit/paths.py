"""The folder for files that prefixkit can make or fetch again, and how files are written there."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class SharedCache(OSError):
    """Other users may write to the cache folder, from which code and models are loaded."""


def cache_dir(platform: str = sys.platform) -> Path:
    """The user's cache folder: ``$PREFIXKIT_CACHE``, or ``prefixkit`` in the platform's cache folder.

    Args:
        platform: As in ``sys.platform``.

    Raises:
        SharedCache: Other users may write to the folder, from which compiled kernels and models are loaded.
        OSError: The system knows no home folder for the user, or for the one that ``$PREFIXKIT_CACHE`` names.
    """
    try:
        chosen = os.environ.get("PREFIXKIT_CACHE")
        folder = Path(chosen).expanduser() if chosen else _platform_cache(platform) / "prefixkit"
    except RuntimeError as error:  # from pathlib, if it finds no home folder
        raise OSError(
            f"no place for the cache ({error}); set PREFIXKIT_CACHE to a folder that can be written"
        ) from error
    _check_private(folder)
    return folder


def as_path(path: object) -> Path:
    """A path that a user gave; TypeError if it is no path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a string or a path, got {type(path).__name__} {path!r}")
    return Path(path)


def _check_private(folder: Path) -> None:
    """Raise SharedCache if other users may write files that this user's processes would load.

    A folder that belongs to root or to the user, and that others may only read, is fine: one cache may serve all users.
    """
    if sys.platform == "win32":
        return
    try:
        found = folder.stat()
    except OSError:
        return  # the first process that writes there makes the folder
    me = os.geteuid()
    if found.st_uid not in (me, 0) and me != 0:
        who = f"it belongs to another user (id {found.st_uid})"
    elif found.st_mode & 0o002:
        who = "every user may write there"
    elif found.st_mode & 0o020 and found.st_gid not in (0, _own_group(found.st_uid)):
        who = f"the group {found.st_gid} may write there"
    else:
        return
    raise SharedCache(
        f"the cache folder {folder} is not safe to load from: {who}; run chmod go-w on it, or set PREFIXKIT_CACHE to a "
        "folder that only you, or root, can write"
    )


def _own_group(user: int) -> int | None:
    """The id of the group with the user's own name, if it has no other members (the custom); else None."""
    import grp
    import pwd

    try:
        group = grp.getgrnam(pwd.getpwuid(user).pw_name)
    except KeyError:
        return None
    return None if group.gr_mem else group.gr_gid


def _platform_cache(platform: str) -> Path:
    if platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def put(place: Path, content: bytes) -> None:
    """Write a file so that a concurrent reader finds either the whole new file or the old one.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as file:
        file.write(content)


def check_replaceable(place: Path) -> None:
    """Raise OSError if ``place`` is a device, a pipe or a socket: the file would take its place, as /dev/null's."""
    if place.exists() and not place.is_file() and not place.is_dir():  # a folder is not replaced: the rename fails
        raise OSError(f"{place} cannot be written: it is no regular file, and a file would replace it; name a file")


@contextmanager
def replacing(place: Path) -> Iterator[BinaryIO]:
    """A file that replaces ``place``, if there is one, at the end of the block; if the block raises, nothing changes.

    Raises:
        OSError: the file cannot be made in the folder of ``place``, which must exist, or cannot be written; or
            ``place`` is no regular file.
    """
    check_replaceable(place)
    name = place.parent / f".making-{secrets.token_hex(8)}"
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the umask decides who may read it
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise

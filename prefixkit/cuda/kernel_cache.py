"""Compiled kernels kept on disk.

An entry's name is a digest of all that the machine code depends on, so entries never go stale.  They are written beside
their place and renamed into it, and carry a checksum: a reader meets a whole entry or none.  An advisory lock, dropped
when its holder dies, keeps many processes that start together from compiling the same thing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from prefixkit.cuda.nvrtc import FLAGS, Binary, Unit, sources
from prefixkit.paths import cache_dir, put

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

log = logging.getLogger("prefixkit")

FORMAT = b"prefixkit kernel 2\n"
# Nothing takes longer to compile; a process that has waited this long compiles by itself.
LOCK_SECONDS = 120.0
_complained: set[Path] = set()


def folder() -> Path:
    """Where entries are kept."""
    return cache_dir() / "kernels"


def entry(unit: Unit, arch: str, nvrtc: tuple[int, int], flags: str = FLAGS) -> Path:
    """The place of a unit's machine code, by this version of the compiler with these flags for all units."""
    digest = sha256()
    for part in (FORMAT.decode(), arch, repr(nvrtc), flags, unit.file, *unit.names, repr(unit.defines)):
        digest.update(part.encode() + b"\0")
    for name, text in sources(unit).items():
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return folder() / f"{Path(unit.file).stem}-{arch}-{digest.hexdigest()[:24]}.bin"


def read(place: Path) -> Binary | None:
    """The entry, or None if there is none or it is damaged."""
    try:
        data = place.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _complain(place.parent, error)
        return None
    head, body = data[: len(FORMAT) + 64], data[len(FORMAT) + 64 :]
    if head != FORMAT + sha256(body).hexdigest().encode():
        log.warning("the compiled kernel %s is damaged; it is made again", place)
        with suppress(OSError):
            place.unlink()
        return None
    lines, _, cubin = body.partition(b"\n")
    return Binary(cubin, **json.loads(lines))


def write(place: Path, binary: Binary) -> bool:
    """Keep an entry if that is possible; a folder that cannot be written gets one line in the log."""
    body = json.dumps({"symbols": binary.symbols, "log": binary.log}).encode() + b"\n" + binary.cubin
    try:
        put(place, FORMAT + sha256(body).hexdigest().encode() + body)
    except OSError as error:
        _complain(place.parent, error)
        return False
    return True


@contextmanager
def making(place: Path, most_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold an entry's lock, or go without where there are no locks or the wait is longer than ``most_seconds``."""
    lock = place.with_suffix(".lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) if fcntl else -1
    except OSError as error:
        _complain(place.parent, error)
        handle = -1
    try:
        if handle >= 0:
            _wait(handle, lock, most_seconds)
        yield
    finally:
        if handle >= 0:
            with suppress(OSError):
                os.unlink(lock)  # before others get it: they open a new one, or find the entry
            os.close(handle)


def _wait(handle: int, lock: Path, most_seconds: float) -> None:
    assert fcntl is not None
    give_up = time.monotonic() + most_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up:
                log.warning("%s has been locked for %.0f s; going on without it", lock, most_seconds)
                return
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return


def _complain(place: Path, error: OSError) -> None:
    if place not in _complained:
        _complained.add(place)
        log.warning(
            "compiled kernels cannot be kept in %s (%s), so every process compiles them again; set PREFIXKIT_CACHE to "
            "a folder that can be written",
            place,
            error.strerror or error,
        )

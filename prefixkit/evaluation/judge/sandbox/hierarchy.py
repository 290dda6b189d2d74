"""Finds the hierarchy of control groups (cgroups, version 2 or 1) in which this process may make its own.

The search changes nothing, and existing cgroups are never changed: no controller is enabled, and the judge itself is
not moved.  In version 1 new cgroups are children of the judge's own.  In version 2 a cgroup with processes gives no
controllers to its children, so new ones are siblings of the judge's own, in its parent.  Limits of the judge's own
cgroup do not hold there, so a judge with such limits makes no cgroups.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONTROLLERS = ("memory", "pids")
# Without pids.max: systemd sets it for every unit, and the limit of a new cgroup is far lower.
_LIMITS = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "cpuset.mems")
_REMEDY = "where systemd runs, try `systemd-run --user --scope` before the command"


class NoHierarchy(OSError):
    """This process may not make cgroups; the message says why."""


@dataclass(frozen=True)
class Hierarchy:
    """The folders in which cgroups can be made.

    Attributes:
        version: The version of the kernel's interface.
        memory: The folder for new cgroups that limit memory.
        pids: The folder for new cgroups that limit the number of processes and threads; in version 2 the same folder.
    """

    version: Literal[1, 2]
    memory: Path
    pids: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """Each folder once."""
        return tuple(dict.fromkeys((self.memory, self.pids)))


@dataclass(frozen=True)
class _Mount:
    kind: str
    root: str
    place: Path
    options: frozenset[str]


def find_hierarchy(process: Path = Path("/proc/self")) -> Hierarchy:
    """The hierarchy in which this process may make cgroups with limits on memory and processes.

    Args:
        process: The process' folder in /proc; its ``mountinfo`` and ``cgroup`` are read.

    Raises:
        NoHierarchy: there is no such hierarchy.
    """
    try:
        mounts = [_mount(line) for line in (process / "mountinfo").read_text().splitlines()]
        rows = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except (OSError, ValueError, IndexError) as error:
        raise NoHierarchy(f"/proc cannot be read: {error}") from None
    own = {name: path for _, names, path in rows for name in names.split(",")}
    if all(name in own for name in CONTROLLERS):
        memory, pids = (_version_1(name, own[name], mounts) for name in CONTROLLERS)
        return Hierarchy(1, memory, pids)
    if "" not in own:
        raise NoHierarchy("there are no cgroups for memory and processes")
    folder = _version_2(own[""], mounts)
    return Hierarchy(2, folder, folder)


def _mount(line: str) -> _Mount:
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    root, place = (re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text) for text in before.split()[3:5])
    return _Mount(kind, root, Path(place), frozenset(options.split(",")))


def _version_1(controller: str, path: str, mounts: list[_Mount]) -> Path:
    """The judge's own cgroup of one controller."""
    for mount in mounts:
        if mount.kind == "cgroup" and controller in mount.options:
            folder = _own(mount, path)
            if not os.access(folder, os.W_OK):
                raise NoHierarchy(f"{folder} cannot be written")
            return folder
    raise NoHierarchy(f"the controller {controller} is not mounted")


def _version_2(path: str, mounts: list[_Mount]) -> Path:
    """The root if the judge is in it, else the parent of the judge's own cgroup."""
    mount = next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    if mount is None:
        raise NoHierarchy("cgroups are not mounted")
    own = _own(mount, path)
    if _gives(own):
        return _writable(own)
    if own == mount.place:
        raise NoHierarchy(f"{own} has no controllers for cgroups below it, and its parent cannot be seen from here")
    for name in _LIMITS:
        if _read(own / name).split()[:1] not in ([], ["max"]):
            raise NoHierarchy(f"{own} has a limit of its own, {name}, which does not hold for cgroups beside it")
    if not _gives(own.parent):
        raise NoHierarchy(f"{own.parent} gives no controllers for memory and processes to cgroups below it; {_REMEDY}")
    return _writable(own.parent)


def _own(mount: _Mount, path: str) -> Path:
    """A cgroup's folder under a mount, which shows only cgroups below its root."""
    inside = os.path.relpath(path, mount.root)
    folder = mount.place / inside
    if inside.split("/")[0] == ".." or not folder.is_dir():
        raise NoHierarchy(f"the cgroup {path} cannot be seen in {mount.place}")
    return folder


def _gives(folder: Path) -> bool:
    return set(_read(folder / "cgroup.subtree_control").split()) >= set(CONTROLLERS)


def _writable(folder: Path) -> Path:
    """``folder``, if the judge may make cgroups in it and move its own programs into them."""
    for path in (folder, folder / "cgroup.procs"):
        if not os.access(path, os.W_OK):
            raise NoHierarchy(f"{path} cannot be written; {_REMEDY}")
    return folder


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

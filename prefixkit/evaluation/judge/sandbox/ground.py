"""The user and the mounts under which sandboxes start: never as root, and with a readable interpreter."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from prefixkit.evaluation.judge.judge_errors import NoSandbox

_NOBODY = 65534
_PLACES = ("/mnt", "/media", "/srv", "/opt")  # one of them is covered, in a mount namespace of our own
_REMEDY = "run as an ordinary user, or with a Python that every user can read"
_SHOW = f"""
mount -t tmpfs -o mode=755,size=64k none "$2" && mkdir "$2/prefix" && mount --rbind "$1" "$2/prefix" || {{
    echo "others cannot read $1, nor a mount of it: {_REMEDY}" >&2
    exit 1
}}
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Ground:
    """The user and the mounts under which a sandbox starts.

    Attributes:
        user: The user who starts it; -1: the judge's user.
        prefix: The command to put before bubblewrap's.
        places: Folders, and the paths at which bubblewrap finds them.
    """

    user: int = -1
    prefix: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)


def interpreter() -> tuple[str, str]:
    """The interpreter's file and the folder that it needs; links of virtual environments are followed."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    return os.path.realpath(base), os.path.realpath(sys.base_prefix)


@cache
def ground() -> Ground:
    """The user and the mounts under which this process' sandboxes start.

    Root in a user namespace of root's own is still root to some parts of the kernel (settings in /proc, limits on
    processes), whatever its capabilities.  So root becomes ``nobody`` before it starts bubblewrap; if ``nobody`` cannot
    reach the interpreter, as in /root, a mount namespace shows it in another place.

    Raises:
        NoSandbox: root cannot become ``nobody`` here, or cannot make the interpreter readable for ``nobody``.
    """
    if os.geteuid() != 0:
        return Ground()
    setpriv, unshare = shutil.which("setpriv"), shutil.which("unshare")
    if not setpriv or not unshare:
        raise NoSandbox(f"no sandbox for root without util-linux (setpriv, unshare): {_REMEDY}")
    try:
        nobody = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        nobody = _NOBODY
    become = (setpriv, f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups")
    prefix = interpreter()[1]
    if all(path.stat().st_mode & 0o005 == 0o005 for path in (Path(prefix), *Path(prefix).parents)):  # open to all
        return Ground(nobody, become)
    place = next(p for p in _PLACES if Path(p).is_dir() and not f"{prefix}/".startswith(f"{p}/"))
    show = (unshare, "--mount", "--propagation", "private", "sh", "-c", _SHOW, "sh", prefix, place)
    return Ground(nobody, (*show, *become), {prefix: f"{place}/prefix"})

"""Where a sandbox is started from: never as root, and where that user can read the interpreter."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefixkit.judge.errors import NoSandbox

_NOBODY = 65534
_PLACES = ("/mnt", "/media", "/srv", "/opt")  # one of which is covered in a mount namespace of our own
_REMEDY = "run as an ordinary user, or with a Python that every user can read"


@dataclass(frozen=True)
class Ground:
    """Where a sandbox is started from.

    Attributes:
        user: Who starts it; -1: whoever the judge runs as.
        prefix: Put before bubblewrap's command.
        places: Folders, and where bubblewrap finds them.
        held: Descriptors that keep the mounts alive.
    """

    user: int = -1
    prefix: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    held: tuple[int, ...] = ()

    def seen(self, place: str) -> str:
        return self.places.get(place, place)


def make_ground(prefix: str) -> Ground:
    """The ground of this process' sandboxes.

    Root in a user namespace of root's own is still root to some parts of the kernel (settings in /proc, limits on
    processes), whatever its capabilities.  So root becomes ``nobody`` before it starts bubblewrap; where ``nobody``
    cannot reach the interpreter, as in /root, a mount namespace shows it in another place.

    Args:
        prefix: The folder that the interpreter needs.

    Raises:
        NoSandbox: root cannot become ``nobody`` here, or cannot show it the interpreter.
    """
    if os.geteuid() != 0:
        return Ground()
    nobody = _nobody()
    tool = shutil.which("nsenter")
    setpriv = shutil.which("setpriv")
    if setpriv and all(_open_to_all(path) for path in (Path(prefix), *Path(prefix).parents)):
        return Ground(nobody, (setpriv, f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups"))
    if not tool or not setpriv:
        raise NoSandbox(f"no sandbox for root without util-linux (nsenter, setpriv): {_REMEDY}")
    place = next(p for p in _PLACES if Path(p).is_dir() and not f"{prefix}/".startswith(f"{p}/"))
    namespace = _shown(prefix, place)
    enter = (tool, f"--mount=/proc/{os.getpid()}/fd/{namespace}", f"--wd={place}")
    become = (setpriv, f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups")
    return Ground(nobody, (*enter, "--", *become), {prefix: f"{place}/prefix"}, (namespace,))


def _nobody() -> int:
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return _NOBODY


def _open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & 0o005 == 0o005)


def _shown(prefix: str, place: str) -> int:
    """A mount namespace in which a folder appears in another place too, as a descriptor."""
    script = 'mount -t tmpfs -o mode=755,size=64k none "$2" && mkdir "$2/prefix" && mount --rbind "$1" "$2/prefix" '
    script += '&& echo made && read -r _ && rmdir "$2/none"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", prefix, place]
    maker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert maker.stdout is not None
    try:
        if maker.stdout.readline() != b"made\n":
            detail = maker.communicate()[1].decode("utf-8", "replace").strip()
            raise NoSandbox(f"no sandbox for root: others cannot read {prefix}, nor a mount of it: {detail}; {_REMEDY}")
        return os.open(f"/proc/{maker.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        maker.kill()
        maker.communicate()

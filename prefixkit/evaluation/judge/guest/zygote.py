"""A warm interpreter in a sandbox: it forks the process of each program, which gets namespaces of its own.

The interpreter itself only passes descriptors on.  Only a program's own processes read that program's data.
"""

import ctypes
import gc
import marshal
import os
import signal
import socket
from typing import Any  # most programs import it too, and the import takes longer than the rest of their start

from prefixkit.evaluation.judge.guest.start import READY

_NEW_CGROUP, _PIDFD = 0x02000000, 0x00001000  # flags of clone
_DUMPABLE, _SECCOMP, _DROP_BOUND, _SUBREAPER = 4, 22, 24, 36  # options of prctl
_CAPABILITIES_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # calls hold the interpreter's lock


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def serve(spec: dict[str, Any]) -> dict[str, Any]:
    """Fork for each request until the socket ends; return in each program's process, with the spec of that program.

    Args:
        spec: ``control``: the socket over which the descriptors of each program come; ``namespaces``: flags of the
            namespaces that a program gets, 0 for none; ``mounts``: the mounts in them, as arguments of ``mount``;
            ``sealing``: flags that make the program's folder read-only; ``nesting``: whether the program may make more
            namespaces; ``filter``: its seccomp filter.  All but the first two are for programs with namespaces.
    """
    control = socket.socket(fileno=spec["control"])
    spec["ids"] = os.getuid(), os.getgid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _prctl(_SUBREAPER, 1)
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 16)
        if not descriptors:
            os._exit(0)
        try:
            child, pidfd = _fork(spec["clone"], spec["namespaces"])
        except OSError as error:
            control.send(str(error).encode())
        else:
            if not child:
                control.detach()
                return _program(spec, descriptors)
            socket.send_fds(control, [b"!"], [pidfd])
            os.close(pidfd)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(clone: int, namespaces: int) -> tuple[int, int]:
    """As ``os.fork``, into new namespaces; also returns a descriptor of the child, which may have ended by then."""
    pidfd = ctypes.c_int(-1)
    _python.PyOS_BeforeFork()
    child: int = _python.syscall(clone, namespaces | signal.SIGCHLD | _PIDFD, 0, ctypes.byref(pidfd), 0, 0)
    if child:
        _python.PyOS_AfterFork_Parent()
    else:
        _python.PyOS_AfterFork_Child()
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone: " + os.strerror(ctypes.get_errno()))
    return child, pidfd.value


def _program(spec: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Return in the program's process; its parent, whose memory and descriptors it cannot reach, reports its end."""
    ready, content, *entrances = descriptors[3:]
    for entrance in entrances:
        os.write(entrance, b"0")  # enters a cgroup
    os.setsid()
    for place, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, place)
    os.dup2(content, READY + 1)
    os.dup2(ready, READY)
    os.closerange(READY + 2, os.sysconf("SC_OPEN_MAX"))
    if spec["namespaces"]:
        user, group = spec["ids"]
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            _write(f"/proc/self/{name}", text)
    _prctl(_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (program := os.fork()):
        return _prepared(spec)
    os.closerange(0, READY)
    _confine(spec)
    while (ended := os.wait())[0] != program:
        pass
    os.write(READY, os.waitstatus_to_exitcode(ended[1]).to_bytes(2, "big", signed=True))
    os._exit(0)


def _prepared(spec: dict[str, Any]) -> dict[str, Any]:
    """Read the program's spec in its process, prepare its mounts and files, confine it; returns the spec."""
    with open(READY + 1, "rb") as file:
        told: dict[str, Any] = marshal.load(file)
    folder = told["folder"]
    if spec["namespaces"]:
        if not spec["nesting"]:
            _write("/proc/sys/user/max_user_namespaces", "0")
        _call("unshare", _NEW_CGROUP)
        for kind, place, flags, options in spec["mounts"]:
            _mount(kind, place, flags, options)
    for name, text in told["files"].items():
        with open(f"{folder}/{name}", "wb", opener=lambda path, flags: os.open(path, flags, 0o555)) as file:
            file.write(text)
    if spec["namespaces"]:
        _mount("", folder, spec["sealing"], "")
        folder = "/tmp"
    os.chdir(folder)
    attributes = ctypes.create_string_buffer(256)  # defaults of new threads
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(told["thread_stack"]))
    _libc.pthread_setattr_default_np(attributes)
    _confine(spec)
    _prctl(_DUMPABLE, 1)
    return told


def _confine(spec: dict[str, Any]) -> None:
    """Give up all capabilities, and the system calls that the filter refuses."""
    if spec["namespaces"]:
        capability = 0
        while _libc.prctl(_DROP_BOUND, capability, 0, 0, 0) == 0:
            capability += 1
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())
        content = spec["filter"]
        _prctl(_SECCOMP, 2, ctypes.byref(_Filter(len(content) // 8, content)))


def _mount(kind: str, place: str, flags: int, options: str) -> None:
    _call("mount", kind.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _prctl(option: int, *arguments: Any) -> None:
    _call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

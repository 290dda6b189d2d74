"""The protections of a sandbox by name, so that a test can switch one off and see what it prevented."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protections:
    """What a sandbox prevents; each name may stand for several mechanisms against the same threat.

    Only tests set any of them to False.  Nothing on the command line or in a data set reaches them.

    Attributes:
        network: A network namespace of its own; no sockets.
        files: A read-only root with nothing but the interpreter and libraries.  Without: the machine's own files.
        disk: /tmp holds no more than ``DISK_MIB``, and a file no more either.
        processes: No process besides the candidate's own; few threads.
        pids: A process namespace of its own, with a /proc of its own; no signals to other processes.
        memory: Address space is limited, and memory of the cgroup.
        time: Wall time and CPU time are limited.  Without: ``FAR`` times as much.
        output: Output to standard output and standard error is limited.  Without: ``FAR`` times as much.
        ptrace: No debugging, and no access to another process' memory or files.
        namespaces: No new namespaces, mounts or roots.
        ipc: An IPC namespace of its own; no shared memory, queues or semaphores; no anonymous files.
        kernel: None of the rarely used parts of the kernel: keys, io_uring, BPF, modules, clocks, user ids.
        environment: No environment variables of the judge.
        cgroups: If this machine lets the judge make cgroups, the memory and processes of a program are limited in
            total, and its remaining processes are killed through its cgroup too.
    """

    network: bool = True
    files: bool = True
    disk: bool = True
    processes: bool = True
    pids: bool = True
    memory: bool = True
    time: bool = True
    output: bool = True
    ptrace: bool = True
    namespaces: bool = True
    ipc: bool = True
    kernel: bool = True
    environment: bool = True
    cgroups: bool = True


EVERY = Protections()
DISK_MIB = 64
THREADS = 64
FAR = 20

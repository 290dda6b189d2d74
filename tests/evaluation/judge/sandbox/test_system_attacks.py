"""Attacks on the machine: each is contained, and each succeeds where its one protection is taken away.

An attack is a program that prints "escaped" where it gets what it wants, and "contained" otherwise.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixkit.evaluation.judge.sandbox.cgroup import Cgroups
from prefixkit.evaluation.judge.sandbox.sandbox import cgroups
from tests.evaluation.judge.judging import needs_sandbox, streams, verdict

pytestmark = needs_sandbox()

BEGIN = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)

def number(name):
    here = os.uname().machine
    return {"x86_64": X86, "aarch64": ARM}[here][name]

X86 = dict(ptrace=101, process_vm_readv=310, unshare=272, mount=165, chroot=161, memfd_create=319, shmget=29, msgget=68,
           semget=64, io_uring_setup=425, keyctl=250, add_key=248, personality=135, userns=56, tkill=200, clone3=435,
           io_setup=206, inotify_init1=294)
ARM = dict(ptrace=117, process_vm_readv=270, unshare=97, mount=40, chroot=51, memfd_create=279, shmget=194, msgget=186,
           semget=190, io_uring_setup=425, keyctl=219, add_key=217, personality=92, userns=220, tkill=130, clone3=435,
           io_setup=0, inotify_init1=26)

def call(name, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number(name), *arguments)

def refused(name, *arguments):
    return call(name, *arguments) == -1 and ctypes.get_errno() == errno.EPERM
"""
END = """
try:
    escaped = attack()
except (Exception, SystemExit) as error:
    escaped = False
print("escaped" if escaped else "contained", flush=True)
os._exit(0)
"""

# Of each: the protection, and the body of `attack()`, which returns whether it succeeded.
ATTACKS = {
    "fork": ("processes", "pid = os.fork()\nif not pid: os._exit(0)\nreturn os.waitpid(pid, 0)[1] == 0"),
    "fork bomb": (
        "processes",
        "for n in range(30):\n    if not os.fork():\n        import time; time.sleep(0.2); os._exit(0)\nreturn True",
    ),
    "spawn a program": (
        "processes",
        "import subprocess\nreturn subprocess.run([sys.executable, '-S', '-c', '']).returncode == 0",
    ),
    "spawn without fork": (
        "processes",
        "return os.waitpid(os.posix_spawn(sys.executable, [sys.executable, '-S', '-c', ''], {}), 0)[1] == 0",
    ),
    "thread bomb": (
        "processes",
        "import threading\nthreading.stack_size(65536)\nstop = threading.Event()\n"
        "for n in range(200):\n    threading.Thread(target=stop.wait, daemon=True).start()\nreturn True",
    ),
    "memory": ("memory", "return len(bytearray(300 << 20)) > 0"),
    "memory that is mapped": ("memory", "import mmap\nreturn len(mmap.mmap(-1, 300 << 20)) > 0"),
    "fill /tmp": (
        "disk",
        "for n in range(5):\n    with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(16 << 20))\nreturn True",
    ),
    "a huge file": ("disk", "file = open('/tmp/huge', 'wb')\nfile.truncate(100 << 20)\nreturn True"),
    "read a file": ("files", "return open(SECRET).read() == 'secret'"),
    "read a file over a link": (
        "files",
        "os.symlink(SECRET, '/tmp/l%d' % os.getpid())\n"
        "name = '/tmp/l%d' % os.getpid()\n"
        "try: return open(name).read() == 'secret'\nfinally: os.unlink(name)",
    ),
    "read a file over /proc": ("files", "return open('/proc/self/root' + SECRET).read() == 'secret'"),
    "read /etc/passwd": ("files", "return 'root' in open('/etc/passwd').read()"),
    "read installed packages": (
        "files",
        "return bool(os.listdir(os.path.dirname(os.__file__) + '/site-packages'))",
    ),
    "look into home folders": ("files", "return os.path.isdir('/home')"),
    "write a file": ("files", "open(FOLDER + '/written', 'w').close()\nreturn True"),
    "delete a file": ("files", "os.unlink(FOLDER + '/deletable')\nreturn True"),
    "tcp": ("network", "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nreturn True"),
    "udp": (
        "network",
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "return s.sendto(b'x', ('127.0.0.1', PORT)) == 1",
    ),
    "abstract unix socket": (
        "network",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0' + ABSTRACT)\nreturn True",
    ),
    "raw socket": ("network", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nreturn True"),
    "larger buffers of sockets": (
        "network",
        "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)\n"
        "return True",
    ),
    "descriptors in flight": (
        "network",
        "import socket\na, b = socket.socketpair()\nreturn socket.send_fds(a, [b'x'], [0]) == 1",
    ),
    "kill another process": ("pids", "os.kill(VICTIM, 15)\nreturn True"),
    "look at other processes": ("pids", "return os.path.exists(f'/proc/{VICTIM}/status')"),
    "ptrace": ("ptrace", "return call('ptrace', 0, 0, 0, 0) == 0"),
    "read a process' memory": ("ptrace", "return not refused('process_vm_readv', os.getpid(), 0, 0, 0, 0, 0)"),
    "new user namespace": ("namespaces", "return call('unshare', 0x10000000) == 0"),
    "new mount": (
        "namespaces",
        "call('unshare', 0x10020000)\nreturn call('mount', b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    ),
    "new root": ("namespaces", "call('unshare', 0x10000000)\nreturn call('chroot', b'/tmp') == 0"),
    "processes over clone3": (
        "processes namespaces",
        "ctypes.set_errno(0); call('clone3', None, 0)\nreturn ctypes.get_errno() != errno.ENOSYS",
    ),
    "anonymous file": ("ipc", "return call('memfd_create', b'x', 0) >= 0"),
    "run an anonymous file": (
        "ipc",
        "fd = os.memfd_create('x', 0)\nos.write(fd, open(sys.executable, 'rb').read())\n"
        "if 'again' in sys.argv: return True\n"
        "sys.stdout.flush()\nos.execve(fd, ['x', '-S', '-c', 'print(\"escaped\")'], {})",
    ),
    "shared memory": ("ipc", "return call('shmget', 0, 4096, 0o1600) >= 0"),
    "message queue": ("ipc", "return call('msgget', 0, 0o1600) >= 0"),
    "semaphores": ("ipc", "return call('semget', 0, 1, 0o1600) >= 0"),
    "io_uring": ("kernel", "return not refused('io_uring_setup', 0, None)"),
    "keys": ("kernel", "return not refused('keyctl', 0, -3, 0)"),
    "a key": ("kernel", "return not refused('add_key', b'user', b'x', b'x', 1, -3)"),
    "slots of asynchronous io": ("kernel", "return call('io_setup', 1, ctypes.byref(ctypes.c_ulong())) == 0"),
    "instances of inotify": ("kernel", "return call('inotify_init1', 0) >= 0"),
    "set user id": ("kernel", "os.setuid(os.getuid())\nreturn True"),
    "personality": ("kernel", "return call('personality', 0x0040000) >= 0"),
    "environment": ("environment", "return 'PREFIXKIT_TEST_SECRET' in os.environ"),
}


@pytest.fixture(scope="module")
def surroundings() -> Iterator[str]:
    """Things worth attacking, as Python assignments."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / "secret").write_text("secret")
    (folder / "deletable").write_text("")
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    victim = subprocess.Popen(["sleep", "300"], **nobody)  # type: ignore[call-overload]
    abstract = f"prefixkit-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + abstract)
        unix.listen()
        os.environ["PREFIXKIT_TEST_SECRET"] = "1"
        yield (
            f"SECRET = {str(folder / 'secret')!r}\nFOLDER = {str(folder)!r}\nPORT = {tcp.getsockname()[1]}\n"
            f"ABSTRACT = {abstract!r}\nVICTIM = {victim.pid}\n"
        )
        del os.environ["PREFIXKIT_TEST_SECRET"]
    victim.kill()
    victim.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def program(body: str, surroundings: str) -> str:
    return f"{BEGIN}\n{surroundings}\ndef attack():\n{textwrap.indent(body, '    ')}\n{END}"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained_by_its_protection_and_by_no_other(name: str, surroundings: str) -> None:
    protection, body = ATTACKS[name]
    source = program(body, surroundings)
    assert verdict(source, streams(("", "contained")), memory=256).passed
    escaped = verdict(source, streams(("", "escaped")), *protection.split(), memory=256)
    assert escaped.passed, escaped


# Attacks that several protections refuse, or the kernel itself.
ALSO_REFUSED = {
    "become root": "os.setuid(0)\nreturn True",
    "change the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nreturn True",
    "change the host's name": "import socket\nsocket.sethostname('x')\nreturn True",
    "change a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('core')\nreturn True",
    "read the kernel's setting as root would": "open('/proc/sys/vm/drop_caches', 'w').write('1')\nreturn True",
    "write to the interpreter": "open(os.__file__, 'a')\nreturn True",
    "write to the root": "os.mkdir('/new')\nreturn True",
    "write to /dev": "open('/dev/x', 'w')\nreturn True",
    "write to /dev/shm": "open('/dev/shm/x', 'w')\nreturn True",
    "find devices": "return set(os.listdir('/dev')) > {'null', 'zero', 'full', 'random', 'urandom', 'fd', 'stdin',"
    " 'stdout', 'stderr'}",
    "find a shell": "return any(os.path.exists(p) for p in ('/bin/sh', '/usr/bin/env', '/usr/bin/su'))",
    "find the home folder": "return os.path.isdir('/root') and any(n != '.pyenv' for n in os.listdir('/root'))",
    "kill the judge": "os.kill(os.getppid(), 9)\nreturn True",
    "kill everything": "os.kill(-1, 9)\nreturn True",
    "kill by thread": "return not refused('tkill', 1, 9)",
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nreturn True",
    "make a process of another parent": "import pty\npty.openpty()\nreturn True",
    "read what started the sandbox": "text = open('/proc/1/environ').read() + open('/proc/1/cmdline').read()\n"
    "return 'SECRET' in text or SECRET in text",
    "reach a descriptor of the judge's": "return any(os.path.exists(f'/proc/self/fd/{n}') for n in range(6, 256))",
    "reach pid 1's descriptors": "return any(not os.readlink('/proc/1/fd/' + n)"
    ".startswith(('pipe', 'anon', '/dev/null')) for n in os.listdir('/proc/1/fd'))",
    "type into a terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')\nreturn True",
    "have capabilities": "lines = open('/proc/self/status').read().splitlines()\n"
    "return any(int(line.split()[1], 16) for line in lines if line.startswith('Cap'))",
    "run without a filter": "return 'Seccomp:\\t2' not in open('/proc/self/status').read()",
    "signals and timers of the user": "timer = ctypes.c_void_p()\n"
    "return all(libc.timer_create(1, None, ctypes.byref(timer)) == 0 for n in range(5000))",
    "reach what watches the program": "return os.access('/proc/1/mem', os.W_OK) or bool(os.listdir('/proc/1/fd'))",
    "leave something for the next program": "open('/judge/x', 'w')\nreturn True",
    "be root outside": "return open('/proc/self/uid_map').read().split()[1] == '0'",
}


@pytest.mark.parametrize("name", ALSO_REFUSED)
def test_an_attack_is_refused(name: str, surroundings: str) -> None:
    assert verdict(program(ALSO_REFUSED[name], surroundings), streams(("", "contained"))).passed


def test_programs_share_nothing_that_can_be_written() -> None:
    source = """
        import os
        rows = [line.split() for line in open("/proc/self/mountinfo")]
        writable = {row[4] for row in rows if "ro" not in row[5].split(",")} - {"/proc"}
        writable -= {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
        top = {row[4]: row for row in rows}  # of mounts in one place the last one counts
        assert "ro" in top["/proc"][5].split(",")
        print(sorted(writable), os.listdir("/tmp"))
        open("/tmp/mine", "w").close()
    """
    for _ in range(2):
        found = verdict(source, streams(("", "['/tmp'] []")))
        assert found.passed, found


WASTE = {
    "standard output": "sys.stdout.write('x' * 300000)",
    "standard error": "sys.stderr.write('x' * 300000)",
    "both": "sys.stdout.write('x' * 150000); sys.stderr.write('x' * 150000)",
}


@pytest.mark.parametrize("name", WASTE)
def test_a_flood_of_output_ends_the_program(name: str) -> None:
    source = f"import sys\n{WASTE[name]}\nprint(' done')"
    tests = streams(("", "done"), checker="import sys; sys.exit('done' not in open(sys.argv[3]).read())")
    assert verdict(source, tests, output=256).outcome == "output"
    assert verdict(source, tests, "output", output=256).passed


# Each takes at least 0.3 s, whatever the machine, and ends by itself where its time is not limited.
LONG = {
    "sleep": "time.sleep(0.3)",
    "compute": "end = time.time() + 0.3\nwhile time.time() < end: pass",
    "ignore signals": "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, "
    "ValueError): pass\ntime.sleep(0.3)",
    "set an alarm": "signal.signal(signal.SIGALRM, lambda *a: signal.alarm(1)); signal.alarm(1)\ntime.sleep(0.3)",
    "close every descriptor": "out = os.dup(1)\nfor n in (0, 2, 1): os.close(n)\ntime.sleep(0.3); os.dup2(out, 1)",
    "hold the lock in C": "'x' * 9\nend = time.time() + 0.3\nwhile time.time() < end: sum(range(10**6))",
}


@pytest.mark.parametrize("name", LONG)
def test_a_program_ends_with_its_time(name: str) -> None:
    source = f"import os, signal, sys, time\n{LONG[name]}\nprint('done')"
    found = verdict(source, streams(("", "done")), seconds=0.1)
    assert (found.outcome, found.detail) == ("timeout", "more than 0.1 s")
    assert verdict(source, streams(("", "done")), "time", seconds=0.1).passed


def named(name: str) -> list[int]:
    """Processes of a name, by their numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def gone(name: str) -> bool:
    """Whether no process has this name any more; one that is being killed may take a moment."""
    until = time.monotonic() + 60
    while named(name) and time.monotonic() < until:
        time.sleep(0.01)
    return not named(name)


def test_a_daemon_dies_with_its_sandbox() -> None:
    source = BEGIN + textwrap.dedent("""
        heard, said = os.pipe()
        if not os.fork():
            os.setsid()
            if not os.fork():
                for n in range(3): os.close(n)
                libc.prctl(15, b"NAME", 0, 0, 0)
                os.write(said, b"!")
                import time; time.sleep(600)
            os._exit(0)
        os.read(heard, 1)
        print("done")
    """)
    contained, escaped = f"in-{os.getpid()}", f"out-{os.getpid()}"
    assert verdict(source.replace("NAME", contained), streams(("", "done")), "processes").passed
    time.sleep(0.1)
    assert not named(contained)
    assert verdict(source.replace("NAME", escaped), streams(("", "done")), "processes", "pids", "cgroups").passed
    alive = named(escaped)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert alive


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is of x86_64")
def test_calls_of_another_numbering_kill_the_program() -> None:
    found = verdict("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)", streams(("", "")))
    assert (found.outcome, found.detail[:6]) == ("crashed", "SIGSYS")


def test_a_judge_that_dies_takes_its_sandboxes_along() -> None:
    source = BEGIN + f"libc.prctl(15, b'orphan-{os.getpid()}', 0, 0, 0)\nimport time; time.sleep(30)"
    script = f"from tests.evaluation.judge.judging import *\nverdict({source!r}, streams(('', '')), seconds=30)\n"
    holder = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[4])
    until = time.monotonic() + 20
    while not named(f"orphan-{os.getpid()}") and time.monotonic() < until:
        time.sleep(0.05)
    assert named(f"orphan-{os.getpid()}")
    holder.kill()
    holder.wait()
    time.sleep(0.3)
    assert not named(f"orphan-{os.getpid()}")
    if made := cgroups():
        Cgroups(made.hierarchy)  # as the next judge does
        left = [path for folder in made.hierarchy.folders for path in folder.glob(f"prefixkit-*-{holder.pid}-*")]
        assert not left

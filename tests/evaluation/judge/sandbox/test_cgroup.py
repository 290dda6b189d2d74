"""Cgroups: made for a program, limiting it, gone afterwards, whatever happened in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from prefixkit.evaluation.judge import Judge
from prefixkit.evaluation.judge.sandbox.cgroup import Cgroup, Cgroups
from prefixkit.evaluation.judge.sandbox.hierarchy import Hierarchy, NoHierarchy, find_hierarchy
from tests.evaluation.judge.judging import calls, inside, needs_cgroups, problem

ROOT = Path(__file__).parents[4]


def plain_folders(folder: Path, version: int) -> Hierarchy:
    """A hierarchy that is not the kernel's."""
    if version == 2:
        return Hierarchy(2, folder, folder)
    for name in ("memory", "pids"):
        (folder / name).mkdir()
    return Hierarchy(1, folder / "memory", folder / "pids")


def own_version_2() -> Hierarchy | None:
    """This process' own cgroup of version 2, which may have no controllers; None where it cannot be written."""
    rows = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    mounted = [row[4] for row in rows if row[row.index("-") + 1] == "cgroup2"]
    paths = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not mounted or not paths:
        return None
    folder = Path(f"{mounted[0]}{paths[0]}")
    return Hierarchy(2, folder, folder) if os.access(folder, os.W_OK) else None


def kernels() -> list[Hierarchy]:
    """Hierarchies of the kernel's in which this process may make cgroups, with controllers or without."""
    found = [own_version_2()]
    with suppress(NoHierarchy):
        found.append(find_hierarchy())
    return [one for one in found if one]


def ours(hierarchy: Hierarchy) -> list[str]:
    return [path.name for folder in hierarchy.folders for path in folder.glob(f"prefixkit-*-{os.getpid()}-*")]


each_kernel = pytest.mark.parametrize(
    "hierarchy",
    [pytest.param(one, id=f"version {one.version}") for one in kernels()]
    or [pytest.param(None, marks=pytest.mark.skip(reason="no cgroups can be written here"))],
)


def test_what_is_written_in_version_2(tmp_path: Path) -> None:
    cgroup = Cgroup(plain_folders(tmp_path, 2), "x")
    assert cgroup.folders == (tmp_path / "x",)
    assert [(str(file.relative_to(tmp_path)), *rest) for file, *rest in cgroup.settings(1 << 20, 72)] == [
        ("x/memory.max", 1 << 20, True),
        ("x/memory.swap.max", 0, False),
        ("x/pids.max", 72, True),
    ]
    assert cgroup.settings(None, None) == []
    assert cgroup.entrances() == [tmp_path / "x/cgroup.procs"]


def test_what_is_written_in_version_1(tmp_path: Path) -> None:
    cgroup = Cgroup(plain_folders(tmp_path, 1), "x")
    assert cgroup.folders == (tmp_path / "memory/x", tmp_path / "pids/x")
    assert [(str(file.relative_to(tmp_path)), *rest) for file, *rest in cgroup.settings(1 << 20, 72)] == [
        ("memory/x/memory.limit_in_bytes", 1 << 20, True),
        ("memory/x/memory.memsw.limit_in_bytes", 1 << 20, False),
        ("pids/x/pids.max", 72, True),
    ]
    assert cgroup.entrances() == [tmp_path / "memory/x/tasks", tmp_path / "pids/x/tasks"]


FULL = {"memory.limit_in_bytes": f"{64 << 20}\n", "memory.max_usage_in_bytes": f"{64 << 20}\n"}
SWAPPED = {**FULL, "memory.max_usage_in_bytes": "9\n", "memory.memsw.max_usage_in_bytes": f"{(64 << 20) - 4096}\n"}


@pytest.mark.parametrize(
    ("version", "files", "ran_out"),
    [
        (2, {"memory.events": "low 0\nmax 9\noom 1\noom_kill 1\n"}, True),
        (2, {"memory.events": "low 0\nmax 9\noom 0\noom_kill 0\n"}, False),
        (2, {"memory.events": "low 0\nmax 0\noom 0\noom_kill 1\n"}, False),
        (2, {}, False),
        (1, {**FULL, "memory.oom_control": "under_oom 0\noom_kill 1\n"}, True),
        (1, {**FULL, "memory.oom_control": "under_oom 0\noom_kill 0\n"}, False),
        (1, {**FULL, "memory.max_usage_in_bytes": "9", "memory.oom_control": "oom_kill 1\n"}, False),
        (1, {**SWAPPED, "memory.oom_control": "under_oom 0\noom_kill 1\n"}, True),
        (1, {}, False),
    ],
)
def test_a_kill_counts_where_the_limit_was_reached(
    tmp_path: Path, version: int, files: dict[str, str], ran_out: bool
) -> None:
    """Not where the machine as a whole had no memory left: then the program is not to blame."""
    cgroup = Cgroup(plain_folders(tmp_path, version), "x")
    cgroup.folders[0].mkdir()
    for name, text in files.items():
        (cgroup.folders[0] / name).write_text(text)
    assert cgroup.ran_out() is ran_out


@pytest.mark.parametrize("version", [1, 2])
def test_cgroups_of_dead_judges_are_removed_and_no_others(tmp_path: Path, version: int) -> None:
    hierarchy = plain_folders(tmp_path, version)
    pids, dead = os.stat("/proc/self/ns/pid").st_ino, subprocess.Popen(["true"])
    dead.wait()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    alive = f"prefixkit-{pids}-{os.getpid()}-{started}-0"
    elsewhere = f"prefixkit-{pids + 1}-{dead.pid}-1-0"
    reused = f"prefixkit-{pids}-{os.getpid()}-{int(started) + 1}-0"  # another process has its number now
    for folder in hierarchy.folders:
        for name in (alive, elsewhere, reused, f"prefixkit-{pids}-{dead.pid}-1-17", "prefixkit-own", "user.slice"):
            (folder / name).mkdir()
    Cgroups(hierarchy)
    for folder in hierarchy.folders:
        kept = {path.name for path in folder.iterdir()} - {"memory", "pids"}
        assert kept == {alive, elsewhere, "prefixkit-own", "user.slice"}


@each_kernel
def test_what_is_left_is_killed_and_the_cgroup_gone_after_an_error(hierarchy: Hierarchy) -> None:
    cgroups = Cgroups(hierarchy)
    with pytest.raises(RuntimeError, match="in between"), cgroups.made(None, None) as cgroup:
        command = inside(cgroup, "{ sleep 300 & echo $!; wait; }")
        left = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert left.stdout is not None
        entered = {int(left.stdout.readline()), left.pid}
        for folder in cgroup.folders:
            assert set(map(int, (folder / "cgroup.procs").read_text().split())) == entered
        raise RuntimeError("in between")
    cgroups.clean()
    assert left.wait() == -signal.SIGKILL
    assert left.stdout.read() == b""  # which the other held open too
    assert not any(folder.exists() for folder in cgroup.folders)


@each_kernel
def test_what_a_killed_judge_left_is_killed_and_removed(hierarchy: Hierarchy) -> None:
    script = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "from prefixkit.evaluation.judge.sandbox.cgroup import Cgroups\n"
        "from prefixkit.evaluation.judge.sandbox.hierarchy import Hierarchy\n"
        f"made = Cgroups(Hierarchy({hierarchy.version}, *map(Path, sys.argv[1:]))).made(None, None)\n"
        "cgroup = made.__enter__()\n"
        "print(cgroup.name, flush=True)\n"
        "from tests.evaluation.judge.judging import inside\n"
        "subprocess.run(inside(cgroup, '{ echo $$; exec sleep 300; }'))\n"
    )
    command = [sys.executable, "-c", script, str(hierarchy.memory), str(hierarchy.pids)]
    judge = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    cgroup = Cgroup(hierarchy, judge.stdout.readline().strip())
    program = os.pidfd_open(int(judge.stdout.readline()))
    Cgroups(hierarchy)
    assert all(folder.exists() for folder in cgroup.folders), "its judge is alive"
    judge.kill()
    judge.wait()
    Cgroups(hierarchy)
    assert not any(folder.exists() for folder in cgroup.folders)
    assert judge.stdout.read() == ""  # the program held it open, and is dead
    os.close(program)


@needs_cgroups()
def test_nothing_is_left_when_a_judge_is_done() -> None:
    with Judge(jobs=2) as judge:
        programs = ("def f(): return 1", "def f(): return 2", "while True: pass", "[0] * 10**10")
        limited = problem(calls("f", ((), 1)), seconds=0.5)
        found = dict(judge.verdicts((program, program, limited) for program in programs))
    assert [found[program].outcome for program in programs] == ["passed", "failed", "timeout", "memory"]
    assert ours(find_hierarchy()) == []


LOGGED = (
    "import logging, sys\nsys.version_info >= (3, 11) or sys.exit(77)\nlogging.basicConfig(level=logging.INFO)\n"
    "from prefixkit.evaluation.judge import Judge\nfor n in range(2):\n    with Judge(jobs=1): pass\n"
)


@needs_cgroups()
def test_the_log_says_once_where_cgroups_are() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGED], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.count("each program has a cgroup in") == 1, done.stderr


@needs_cgroups()
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may make cgroups here")
def test_the_log_says_once_that_there_are_none() -> None:
    if any(not path.stat().st_mode & 0o001 for path in ROOT.parents):
        pytest.skip("an ordinary user cannot read the repository")
    nobody = {"user": 65534, "group": 65534, "extra_groups": [], "env": {"PATH": "/usr/bin:/bin"}}
    done = subprocess.run(["/usr/bin/python3", "-B", "-c", LOGGED], cwd=ROOT, capture_output=True, text=True, **nobody)  # type: ignore[call-overload]
    if done.returncode:
        pytest.skip("no Python 3.11 with which an ordinary user can judge")
    assert done.stderr.count("programs run without cgroups") == 1, done.stderr

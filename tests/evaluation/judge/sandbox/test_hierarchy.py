"""Where cgroups can be made, in hierarchies that are plain folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixkit.evaluation.judge.sandbox.hierarchy import NoHierarchy, find_hierarchy

BOTH = "cpu memory pids"


class Machine:
    """A /proc/self and a /sys/fs/cgroup below a folder."""

    def __init__(self, folder: Path) -> None:
        self.process, self.mounted = folder / "proc", folder / "sys"
        self.process.mkdir()
        self.mounts = [f"22 1 0:5 / {folder} rw shared:1 - ext4 /dev/sda rw"]
        self.rows: list[str] = []

    def mount(self, kind: str, name: str = "", options: str = "rw", root: str = "/") -> None:
        place = str(self.mounted / name).replace(" ", "\\040")
        self.mounts.append(f"30 22 0:26 {root} {place} rw,nosuid - {kind} {kind} {options}")

    def cgroup(self, path: str, **files: str) -> Path:
        """A cgroup; in names of files `__` stands for a dot."""
        folder = self.mounted / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"cgroup__procs": "", **files}.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    def found(self) -> tuple[int, list[str]]:
        (self.process / "mountinfo").write_text("\n".join(self.mounts))
        (self.process / "cgroup").write_text("\n".join(self.rows))
        hierarchy = find_hierarchy(self.process)
        return hierarchy.version, [str(folder.relative_to(self.mounted)) for folder in hierarchy.folders]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def scope(machine: Machine) -> Machine:
    """Version 2, and a process in a scope of a user's."""
    machine.mount("cgroup2")
    machine.rows = ["0::/user.slice/app.slice/run-1.scope"]
    machine.cgroup("", cgroup__subtree_control=BOTH)
    machine.cgroup("user.slice/app.slice", cgroup__subtree_control=BOTH, cgroup__controllers=BOTH)
    unlimited = {"memory__max": "max\n", "memory__high": "max\n", "cpu__max": "max 100000\n", "cpuset__cpus": "\n"}
    machine.cgroup("user.slice/app.slice/run-1.scope", cgroup__subtree_control="\n", pids__max="4915\n", **unlimited)
    return machine


def test_a_process_in_the_root_makes_cgroups_there(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.rows = ["0::/"]
    machine.cgroup("", cgroup__subtree_control=BOTH)
    assert machine.found() == (2, ["."])


def test_a_process_elsewhere_makes_them_beside_its_own(scope: Machine) -> None:
    assert scope.found() == (2, ["user.slice/app.slice"])


@pytest.mark.parametrize(
    ("name", "limit"),
    [("memory.max", "1073741824"), ("memory.high", "1073741824"), ("cpu.max", "50000 100000"), ("cpuset.cpus", "0-3")],
)
def test_limits_of_its_own_cgroup_are_not_escaped(scope: Machine, name: str, limit: str) -> None:
    (scope.mounted / "user.slice/app.slice/run-1.scope" / name).write_text(f"{limit}\n")
    with pytest.raises(NoHierarchy, match=rf"run-1.scope has a limit of its own, {name}"):
        scope.found()


@pytest.mark.parametrize("given", ["", "cpu memory", "pids"])
def test_a_parent_has_to_give_both_controllers(scope: Machine, given: str) -> None:
    scope.cgroup("user.slice/app.slice", cgroup__subtree_control=given)
    with pytest.raises(NoHierarchy, match=r"app.slice gives no controllers .*`systemd-run --user --scope`"):
        scope.found()


def test_the_root_of_a_container_gives_none_while_it_has_processes(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.rows = ["0::/"]
    machine.cgroup("", cgroup__subtree_control="", cgroup__controllers=BOTH)
    with pytest.raises(NoHierarchy, match="has no controllers for cgroups below it, and its parent cannot be seen"):
        machine.found()


def test_a_cgroup_that_is_not_shown_is_no_place(scope: Machine) -> None:
    scope.rows = ["0::/../other.scope"]
    with pytest.raises(NoHierarchy, match=r"the cgroup /../other.scope cannot be seen"):
        scope.found()
    scope.rows = ["0::/gone.scope"]
    with pytest.raises(NoHierarchy, match=r"the cgroup /gone.scope cannot be seen"):
        scope.found()


@pytest.fixture
def old(machine: Machine) -> Machine:
    """Version 1, with version 2 mounted beside it without controllers."""
    machine.mount("tmpfs")
    machine.mount("cgroup", "memory", "rw,memory")
    machine.mount("cgroup", "pids", "rw,pids")
    machine.mount("cgroup2", "unified")
    machine.rows = ["8:pids:/", "4:memory:/jobs/7", "3:cpu,cpuacct:/", "1:name=systemd:/", "0::/"]
    for path in ("memory/jobs/7", "pids", "unified"):
        machine.cgroup(path)
    return machine


def test_version_1_makes_them_below_its_own(old: Machine) -> None:
    assert old.found() == (1, ["memory/jobs/7", "pids"])


def test_version_1_in_a_container_that_sees_its_own_cgroup_as_the_root(machine: Machine) -> None:
    machine.mount("cgroup", "me mory", "rw,memory", root="/docker/abc")
    machine.mount("cgroup", "pids", "rw,pids", root="/docker/abc")
    machine.rows = ["8:pids:/docker/abc/inner", "4:memory:/docker/abc"]
    machine.cgroup("me mory")
    machine.cgroup("pids/inner")
    assert machine.found() == (1, ["me mory", "pids/inner"])


def test_a_controller_of_version_1_has_to_be_mounted(old: Machine) -> None:
    old.mounts = [line for line in old.mounts if "rw,pids" not in line]
    with pytest.raises(NoHierarchy, match="the controller pids is not mounted"):
        old.found()


def test_there_may_be_no_cgroups_at_all(machine: Machine) -> None:
    with pytest.raises(NoHierarchy, match="there are no cgroups for memory and processes"):
        machine.found()
    machine.rows = ["0::/"]
    with pytest.raises(NoHierarchy, match="cgroups are not mounted"):
        machine.found()
    (machine.process / "mountinfo").unlink()
    with pytest.raises(NoHierarchy, match="/proc cannot be read"):
        find_hierarchy(machine.process)

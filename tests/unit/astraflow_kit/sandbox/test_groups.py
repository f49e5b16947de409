"""Where control groups can be had, in files as the kernel shows them."""

import os
from pathlib import Path

import pytest

from astraflow_kit.sandbox import groups
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.groups import NoGroups, describe, find_parent, joining, make_group


class Machine:
    """A /proc/self and a cgroup v2 in a folder; the process is in the group `own`."""

    def __init__(self, folder: Path, *, own: str = "/unit", mounted: bool = True) -> None:
        self.proc, self.root = folder / "proc", folder / "cgroup"
        self.base = self.root / own.removeprefix("/").removesuffix("/astraflow")
        self.base.mkdir(parents=True)
        self.proc.mkdir()
        kind = "cgroup2" if mounted else "tmpfs"
        (self.proc / "mountinfo").write_text(f"30 23 0:26 / {self.root} rw shared:4 - {kind} cgroup2 rw\n")
        (self.proc / "cgroup").write_text(f"4:memory:/x\n0::{own}\n")
        self.write(controllers="cpu memory pids", subtree_control="memory pids", procs="7\n8\n")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.base / f"cgroup.{name}").write_text(text)


@pytest.mark.parametrize("own", ["/", "/a/unit", "/a/unit/astraflow"])
def test_groups_are_made_below_the_own_one_or_beside_the_leaf(own: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, own=own)
    assert find_parent(machine.proc) == machine.base


@pytest.mark.parametrize(
    ("own", "files", "mounted", "words"),
    [
        ("/unit", {}, False, "no cgroup v2 is mounted"),
        ("/../unit", {}, True, "no group of cgroup v2 that it can see"),
        ("/unit", {"controllers": "cpu pids"}, True, "lacks the controllers memory"),
        ("/unit", {"controllers": ""}, True, "lacks the controllers memory, pids"),
        ("/unit", {"subtree_control": ""}, True, r"is not delegated \(systemd: Delegate=yes\)"),
    ],
)
def test_where_there_are_none_it_says_why(
    own: str, files: dict[str, str], mounted: bool, words: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, own=own, mounted=mounted)
    machine.write(**files)
    with pytest.raises(NoGroups, match=words):
        find_parent(machine.proc)


def test_processes_of_a_delegated_group_are_moved_into_a_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    machine.write(subtree_control="")
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1", raising=False)
    find_parent(machine.proc, prepare=False)
    assert not (machine.base / "astraflow").exists()
    find_parent(machine.proc)
    assert (machine.base / "astraflow" / "cgroup.procs").read_text() == "8"  # the last that was moved
    assert (machine.base / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_group_has_the_budget_and_the_command_enters_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    monkeypatch.setattr(groups, "_usual_parent", lambda: find_parent(machine.proc))
    group = make_group(Budget(memory_mb=100, disk_mb=28, processes=5))
    assert group is not None
    assert (group / "memory.max").read_text() == str(128 * 2**20)
    assert (group / "pids.max").read_text() == "13"
    assert list(joining(group, ["bwrap"]))[-2:] == [str(group / "cgroup.procs"), "bwrap"]


def test_a_machine_without_groups_bounds_each_process_and_says_so() -> None:
    if make_group(Budget()) is not None:
        pytest.skip("this machine has control groups")
    assert joining(None, ["bwrap"]) == ["bwrap"]
    assert describe().startswith("memory of a sandbox is bounded by process, not together, because ")

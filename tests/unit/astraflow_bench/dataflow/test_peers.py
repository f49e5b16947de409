"""Other systems' rows are measured where they are installed, and say why where they are not."""

import pytest

from astraflow_bench.dataflow import peers


def test_what_is_not_installed_names_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PACKAGES", {"Queue": ("not_there", "not-there")})
    [row] = peers.measure_peers(count=16, tokens=8)
    assert (row.what, row.subject, row.value) == ("batch of 16 × 2k", "Queue", None)
    assert row.unit == "not installed: pip install not-there"


def test_a_program_that_fails_is_a_row_with_the_end_of_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PACKAGES", {"Json": ("json", "json")})
    [row] = peers.measure_peers(count=16, tokens=8)
    assert row.value is None
    assert row.unit.startswith("failed: ")
    assert "Error" in row.unit

"""Tokens of a development run: one for each role, their owner's alone, of no use to anybody after the next start."""

from pathlib import Path

import pytest

from astraflow.errors import UnauthenticatedError
from astraflow_kit.identity.verifier import Verifier
from astraflow_kit.settings import DaemonSettings
from astraflow_launcher.run.run_tokens import RunTokens

ROLES = ("operator", "viewer", "trainer", "rollout")


def _verifier(tokens: RunTokens) -> Verifier:
    return Verifier(DaemonSettings(token_keys_file=tokens.keys), revoked=frozenset)


@pytest.mark.parametrize("role", ROLES)
def test_each_token_has_its_role_and_is_readable_by_its_owner_only(tmp_path: Path, role: str) -> None:
    tokens = RunTokens.make(tmp_path)
    identity = _verifier(tokens).identify(f"Bearer {tokens.of(role).read_text().strip()}")
    assert identity.roles == {role}
    assert tokens.of(role).stat().st_mode & 0o777 == 0o600


def test_nothing_is_left_that_signs(tmp_path: Path) -> None:
    tokens = RunTokens.make(tmp_path)
    left = {path.name for path in tokens.keys.parent.iterdir()}
    assert left == {"signing.jwks.json", *(f"{role}.token" for role in ROLES)}


def test_a_new_start_takes_no_token_of_the_last_one(tmp_path: Path) -> None:
    old = RunTokens.make(tmp_path).of("operator").read_text().strip()
    with pytest.raises(UnauthenticatedError):
        _verifier(RunTokens.make(tmp_path)).identify(f"Bearer {old}")


def test_removed_tokens_are_gone(tmp_path: Path) -> None:
    tokens = RunTokens.make(tmp_path)
    tokens.remove()
    assert list(tokens.keys.parent.iterdir()) == []

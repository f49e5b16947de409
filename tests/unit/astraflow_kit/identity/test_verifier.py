"""Keys and revocations are those of the files as they are now."""

from pathlib import Path

import pytest

from astraflow.errors import UnauthenticatedError
from astraflow_kit.clock import SystemClock
from astraflow_kit.identity.verifier import Verifier
from astraflow_kit.settings import DaemonSettings
from support.tokens import DAY_S, OTHER_KEY, jwk, keys_file, token


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)


def reason(verifier: Verifier, sent: str) -> str:
    """Why it is refused."""
    with pytest.raises(UnauthenticatedError) as caught:
        verifier.identify(f"Bearer {sent}")
    return caught.value.metadata["reason"]


def test_keys_are_rotated_without_a_restart(tmp_path: Path) -> None:
    verifier = Verifier(DaemonSettings(token_keys_file=keys_file(tmp_path)))
    old, new = token("n", "rollout"), token("n", "rollout", key=OTHER_KEY, key_id="new")
    assert reason(verifier, new) == "unknown_key"
    keys_file(tmp_path, jwk(), jwk(OTHER_KEY, key_id="new"))
    assert [verifier.identify(f"Bearer {made}").subject for made in (old, new)] == ["n", "n"]
    keys_file(tmp_path, jwk(OTHER_KEY, key_id="new"))
    assert reason(verifier, old) == "unknown_key"


def test_a_rotation_that_went_wrong_locks_nobody_out(tmp_path: Path) -> None:
    path = keys_file(tmp_path)
    verifier = Verifier(DaemonSettings(token_keys_file=path))
    for content in ("{}", None):
        path.write_text(content) if content else path.unlink()
        assert verifier.identify(f"Bearer {token('n', 'rollout')}").subject == "n"


def test_a_token_is_revoked_by_the_file_or_elsewhere(tmp_path: Path) -> None:
    (revoked := tmp_path / "revoked").write_text("")
    elsewhere: set[str] = set()
    settings = DaemonSettings(token_keys_file=keys_file(tmp_path), revoked_tokens_file=revoked)
    verifier = Verifier(settings, revoked=lambda: frozenset(elsewhere))
    identity = verifier.identify(f"Bearer {token('n', 'rollout')}")
    assert verifier.ended(identity) == ""
    elsewhere.add("jti-n")
    assert reason(verifier, token("n", "rollout")) == "revoked"
    elsewhere.clear()
    revoked.write_text("jti-n\n")
    assert reason(verifier, token("n", "rollout")) == "revoked"
    assert "was revoked" in verifier.ended(identity)


def test_a_token_that_was_accepted_once_is_refused_when_it_ends(tmp_path: Path) -> None:
    class Clock(SystemClock):
        ahead_s = 0.0

        def wall_time_s(self) -> float:
            return super().wall_time_s() + self.ahead_s

    clock, sent = Clock(), token("n", "rollout")
    verifier = Verifier(DaemonSettings(token_keys_file=keys_file(tmp_path)), clock=clock)
    first, again = (verifier.identify(f"Bearer {sent}") for _ in range(2))
    assert first is again, "its signature was checked once"
    clock.ahead_s = DAY_S + 61.0
    assert reason(verifier, sent) == "expired"

"""Tokens and the keys that sign them: what is issued is verified by the public set, also while keys are rotated."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest

from astraflow.errors import AstraflowError, ConflictError, InvalidArgumentError
from astraflow_launcher.issuing.keys import create_keys, public_set_of, read_signing_key, rotate_keys
from astraflow_launcher.issuing.tokens import Grant, describe_token, issue_token, read_ttl

HOUR = timedelta(hours=1)
NODE = Grant(role="rollout", runs=("math",), pools=("a100",), subject="pool-1")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    create_keys(tmp_path / "signing.pem")
    return tmp_path / "signing.pem"


def verified(token: str, key: Path) -> object:
    """The claims, if a server with the public set beside `key` accepts it."""
    keys = jwt.PyJWKSet.from_json(public_set_of(key).read_text())
    name = jwt.get_unverified_header(token)["kid"]
    return jwt.decode(token, keys[name], algorithms=["EdDSA"], audience="astraflow", issuer="astraflow")


def test_a_token_says_who_may_do_what_and_until_when(key: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    claims = verified(issue_token(NODE, ttl=HOUR, key=key, now=now), key)
    assert isinstance(claims, dict)
    assert len(claims.pop("jti")) == 16
    issued = int(now.timestamp())
    assert claims == {
        "iss": "astraflow",
        "aud": "astraflow",
        "sub": "pool-1",
        "role": "rollout",
        "runs": ["math"],
        "pools": ["a100"],
        "policies": ["*"],
        "nodes": ["pool-1"],
        "iat": issued,
        "nbf": issued,
        "exp": issued + 3600,
    }


def test_tokens_of_the_key_before_are_accepted_and_older_ones_are_not(key: Path) -> None:
    first = issue_token(NODE, ttl=HOUR, key=key)
    rotate_keys(key)
    second = issue_token(NODE, ttl=HOUR, key=key)
    assert verified(first, key)
    assert verified(second, key)
    rotate_keys(key)
    assert verified(second, key)
    with pytest.raises(KeyError):
        verified(first, key)
    assert len(json.loads(public_set_of(key).read_text())["keys"]) == 2


def test_the_private_key_is_its_owners_and_the_public_set_holds_nothing_of_it(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    assert all("d" not in entry for entry in json.loads(public_set_of(key).read_text())["keys"])


def test_a_description_shows_all_but_the_signature(key: Path) -> None:
    token = issue_token(NODE, ttl=HOUR, key=key)
    described = describe_token(token)
    assert (described["role"], described["runs"], described["alg"]) == ("rollout", ["math"], "EdDSA")
    assert described["exp"].endswith("Z")
    assert token.rpartition(".")[2] not in json.dumps(described)


REFUSED: dict[str, tuple[Callable[[Path], object], type[AstraflowError], str]] = {
    "keys in their place": (create_keys, ConflictError, "not overwritten"),
    "a key that is not there": (
        lambda key: read_signing_key(key / "x"),
        InvalidArgumentError,
        "astraflow token keys",
    ),
    "the public set for a key": (
        lambda key: read_signing_key(public_set_of(key)),
        InvalidArgumentError,
        "no private key",
    ),
    "no such role": (
        lambda key: issue_token(Grant(role="root", runs=("*",)), ttl=HOUR, key=key),
        InvalidArgumentError,
        "roles: rollout",
    ),
    "no run": (
        lambda key: issue_token(Grant(role="rollout", runs=()), ttl=HOUR, key=key),
        InvalidArgumentError,
        "--run",
    ),
    "what is no token": (lambda key: describe_token("s3cret"), InvalidArgumentError, "no token"),
    "a word for a time": (lambda key: read_ttl("soon"), InvalidArgumentError, "30m, 12h or 30d"),
    "no time": (lambda key: read_ttl("0h"), InvalidArgumentError, "30m, 12h or 30d"),
    "ages": (lambda key: read_ttl("9999d"), InvalidArgumentError, "at most 3650d"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_issued_or_read_is_refused_with_the_remedy(key: Path, case: str) -> None:
    act, kind, says = REFUSED[case]
    with pytest.raises(kind, match=says) as error:
        act(key)
    assert "s3cret" not in error.value.message


def test_a_rotation_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        rotate_keys(tmp_path / "none.pem")
    assert list(tmp_path.iterdir()) == []

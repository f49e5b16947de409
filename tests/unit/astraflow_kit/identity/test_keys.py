"""The file of public keys: one or two Ed25519 keys, and nothing that could sign."""

import json
from typing import Any

import pytest
from jwt.algorithms import OKPAlgorithm

from astraflow_kit.identity.keys import read_keys
from astraflow_kit.settings import SettingsError
from support.tokens import OTHER_KEY, SIGNING_KEY, jwk

PRIVATE = {**OKPAlgorithm.to_jwk(SIGNING_KEY, as_dict=True), "kid": "k"}
RSA = {"kty": "RSA", "kid": "r", "n": "AQAB", "e": "AQAB"}


def read(*entries: Any) -> dict[str, Any]:
    """Keys of a file with these entries."""
    return dict(read_keys(json.dumps({"keys": entries}).encode(), where="keys.json"))


def test_two_keys_verify_while_one_replaces_the_other() -> None:
    assert set(read(jwk(key_id="new"), jwk(OTHER_KEY, key_id="old"))) == {"new", "old"}


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ((), "keys.json holds 0 keys; it needs 1"),
        ((jwk(key_id="1"), jwk(key_id="2"), jwk(key_id="3")), "holds 3 keys"),
        ((jwk(), jwk(OTHER_KEY)), "the same `kid`"),
        ((PRIVATE,), "key 1 is a private key: whoever reads this file could sign tokens"),
        ((RSA,), "'r'.* has kty 'RSA'.*only Ed25519"),
        ((jwk() | {"kid": ""},), "has no `kid`"),
        ((jwk() | {"x": "AA"},), "cannot be read"),
        (("key",), "is no JSON object"),
    ],
)
def test_a_file_that_would_not_do_is_named_with_what_is_wrong(
    entries: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        read(*entries)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"keys": 3}', b"\xff"])
def test_a_file_that_is_no_key_set_is_refused(content: bytes) -> None:
    with pytest.raises(SettingsError, match=r"keys\.json"):
        read_keys(content, where="keys.json")

"""Tokens and keys of tests: one signing key for the whole suite, so that a token is a function of its claims."""

import json
import time
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import OKPAlgorithm

KEY_ID = "suite"
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
HOUR_S, DAY_S = 3600, 86400


def jwk(key: Ed25519PrivateKey = SIGNING_KEY, *, key_id: str = KEY_ID) -> dict[str, str]:
    """The entry of a JWKS for the public half of `key`."""
    return {**OKPAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": key_id}


def keys_file(folder: Path, *entries: dict[str, str]) -> Path:
    """A server's `token_keys_file`; of the suite's key unless entries are given."""
    path = folder / "token-keys.json"
    path.write_text(json.dumps({"keys": list(entries or [jwk()])}))
    return path


def token(
    subject: str,
    role: str,
    /,
    *,
    key: Ed25519PrivateKey = SIGNING_KEY,
    key_id: str = KEY_ID,
    **claims: object,
) -> str:
    """A token of the role for all runs; `claims` replace its own, None leaves one out.

    Valid for a day: many are made when tests are collected, and a slow machine gets to the last of them after an hour.
    """
    now_s = int(time.time())
    usual: dict[str, object] = {
        "iss": "astraflow",
        "aud": "astraflow",
        "sub": subject,
        "role": role,
        "runs": ["*"],
        "pools": ["*"],
        "policies": ["*"],
        "nodes": ["*"],
        "iat": now_s,
        "nbf": now_s,
        "exp": now_s + DAY_S,
        "jti": f"jti-{subject}",
    }
    kept = {name: value for name, value in (usual | claims).items() if value is not None}
    return jwt.encode(kept, key, algorithm="EdDSA", headers={"kid": key_id})

"""The public keys that verify tokens: a JWKS file with one or two Ed25519 keys.

Invariant: no private key is ever taken for a public one, and no other algorithm than EdDSA has a key. Pure; used by
`verifier`.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from astraflow_kit.settings import SettingsError

Keys: TypeAlias = Mapping[str, Ed25519PublicKey]
"""Public keys by their `kid`."""
MAX_KEYS = 2
"""The one that signs now, and the one before or after it."""


def read_keys(content: bytes, *, where: str) -> dict[str, Ed25519PublicKey]:
    """Public keys by `kid` from the bytes of a JWKS. `where` names the file in errors.

    Raises SettingsError naming what is wrong: no JSON, no keys, more than `MAX_KEYS`, a private key, another kind of
    key, a `kid` that is missing or there twice.
    """
    try:
        parsed = json.loads(content)
        entries = parsed["keys"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f'{where} is no JWKS: it must be JSON like {{"keys": [...]}}; make it with `astraflow token keys`'
        ) from error
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        found = len(entries) if isinstance(entries, list) else 0
        raise SettingsError(
            f"{where} holds {found} keys; it needs 1, or {MAX_KEYS} while keys are rotated; make one with "
            "`astraflow token keys`"
        )
    keys = dict(_key(entry, where=f"{where}: key {place}") for place, entry in enumerate(entries, 1))
    if len(keys) < len(entries):
        raise SettingsError(f"{where}: two keys have the same `kid`; each needs its own")
    return keys


def _key(entry: Any, *, where: str) -> tuple[str, Ed25519PublicKey]:  # noqa: ANN401 - parsed JSON
    if not isinstance(entry, dict):
        raise SettingsError(f"{where} is no JSON object")
    if "d" in entry:
        raise SettingsError(
            f"{where} is a private key: whoever reads this file could sign tokens; keep it with whoever signs, put "
            "the public keys here, and replace the key if this file was ever shared"
        )
    name = entry.get("kid")
    if not isinstance(name, str) or not name:
        raise SettingsError(f"{where} has no `kid`; tokens name their key by it")
    if (entry.get("kty"), entry.get("crv")) != ("OKP", "Ed25519"):
        found = f"kty {entry.get('kty')!r}, crv {entry.get('crv')!r}"
        raise SettingsError(f"{where} ({name!r}) has {found}; only Ed25519 keys (kty OKP) verify tokens")
    try:
        key = jwt.PyJWK(entry, algorithm="EdDSA").key
    except jwt.PyJWTError as error:
        raise SettingsError(f"{where} ({name!r}) cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(f"{where} ({name!r}) is no Ed25519 public key")
    return name, key

"""The key that signs tokens: a private one for who issues, and the public ones that servers verify with.

Invariant: the public set holds the key that signs now and at most the one before it, so tokens of both are accepted
while servers and callers change over. Called by `astraflow token` and by whatever makes the secrets of a first start.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from astraflow.errors import InvalidArgumentError
from astraflow_kit.identity.tokens import ALGORITHM
from astraflow_launcher.issuing.secret_files import require_absent, write_file


def public_set_of(path: Path) -> Path:
    """Where the public set of a signing key is: what `token_keys_file` of servers names."""
    return path.with_name(f"{path.stem}.jwks.json")


def create_keys(path: Path) -> Path:
    """Make a signing key and its public set, and return where the set is. Raises ConflictError if either exists."""
    public_set = public_set_of(path)
    require_absent(path, public_set)
    _write(path, Ed25519PrivateKey.generate(), before=[])
    return public_set


def rotate_keys(path: Path) -> Path:
    """Replace a signing key; its public key stays in the set beside the new one, and older ones leave it.

    Raises InvalidArgumentError when there is none.
    """
    _write(path, Ed25519PrivateKey.generate(), before=[_public_entry(read_signing_key(path).public_key())])
    return public_set_of(path)


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises InvalidArgumentError for anything else."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InvalidArgumentError(
            f"signing key {path} cannot be read: {error.strerror}; make one: astraflow token keys {path}"
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"{path} is no private key in PEM: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidArgumentError(f"{path} is no Ed25519 key; make one: astraflow token keys FILE")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """The key's name in tokens and sets: its thumbprint (RFC 7638)."""
    required = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(_raw(key))}
    canonical = json.dumps(required, separators=(",", ":"), sort_keys=True).encode()
    return _base64url(hashlib.sha256(canonical).digest())


def _write(path: Path, key: Ed25519PrivateKey, *, before: list[dict[str, Any]]) -> None:
    entries = [_public_entry(key.public_key()), *before]
    # First the set: a token of the new key must never come before it.
    write_file(public_set_of(path), json.dumps({"keys": entries}, indent=2).encode() + b"\n", secret=False)
    write_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _public_entry(key: Ed25519PublicKey) -> dict[str, Any]:
    return {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": _base64url(_raw(key)),
        "kid": key_id(key),
        "use": "sig",
        "alg": ALGORITHM,
    }


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")

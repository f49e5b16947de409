"""Session credentials and leases that only the server can have made: names sealed by a secret key of the run.

    af1/node/RUN/NODE/NUMBER/LINEAGE/SEAL        af1/trainer/RUN/POLICY/EPOCH/LINEAGE/SEAL        TASK#ATTEMPT.SEAL

A seal is HMAC-SHA256 (RFC 2104) under 256 random bits, so whoever has not been given one cannot make it, and a server
verifies it without asking Redis. Nothing is kept of a credential but its number, by which a session ends. Sealed names
survive a Redis that lost its last second: what was given out then is still proven. Pure.
"""

import hmac
import secrets
from base64 import urlsafe_b64encode
from dataclasses import dataclass

NODE, TRAINER = "node", "trainer"
_PREFIX = "af1"
_SEAL_BYTES = 32
_LEASE_SEAL_BYTES = 18
"""144 bits: 24 characters, none of which pads."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Who speaks: a node or the trainer of a policy, in one run."""

    speaker: str
    """`NODE` or `TRAINER`."""
    run_id: str
    name: str
    """Node id, or id of the policy that the trainer claimed."""
    number: int
    """Which start of the node, or which epoch of the policy's trainers; a higher one of the same name ends this."""
    lineage: str
    """128 random bits in hex that a node keeps over restarts: what was leased to it stays its own."""


def new_key() -> str:
    """A key for the seals of one run, in hex."""
    return secrets.token_hex(32)


def new_lineage() -> str:
    """The lineage of somebody who has proven nothing yet."""
    return secrets.token_hex(16)


def issue(session: Session, *, key: str) -> str:
    """The credential of a session: what its holder sends with every call. A secret."""
    named = _named(session)
    return f"{named}/{_seal(named, key, _SEAL_BYTES)}"


def claimed_session(credential: str) -> Session | None:
    """What a credential says, proven or not; None for a text that is none. `is_issued` proves it."""
    parts = credential.split("/")
    if len(parts) != 7 or parts[0] != _PREFIX or parts[1] not in (NODE, TRAINER):
        return None
    number = parts[4]
    if not (number.isascii() and number.isdecimal() and len(number) <= 16):
        return None
    return Session(speaker=parts[1], run_id=parts[2], name=parts[3], number=int(number), lineage=parts[5])


def is_issued(credential: str, *, key: str) -> bool:
    """Whether this key sealed the credential; compared in constant time."""
    named, _, seal = credential.rpartition("/")
    return _equal(seal, _seal(named, key, _SEAL_BYTES))


def seal_lease(lease: str, *, lineage: str, key: str) -> str:
    """The id of a lease as its holder, a node of this lineage, is given it: `TASK#ATTEMPT` with its seal."""
    return f"{lease}.{_seal(f'lease/{lineage}/{lease}', key, _LEASE_SEAL_BYTES)}"


def opened_lease(lease_id: str, *, lineage: str, key: str) -> str | None:
    """`TASK#ATTEMPT` of a sealed id; None where it was not given to a node of this lineage."""
    lease, _, seal = lease_id.rpartition(".")
    return lease if _equal(seal, _seal(f"lease/{lineage}/{lease}", key, _LEASE_SEAL_BYTES)) else None


def _named(session: Session) -> str:
    return f"{_PREFIX}/{session.speaker}/{session.run_id}/{session.name}/{session.number}/{session.lineage}"


def _seal(text: str, key: str, num_bytes: int) -> str:
    digest = hmac.digest(bytes.fromhex(key), text.encode(), "sha256")[:num_bytes]
    return urlsafe_b64encode(digest).decode().rstrip("=")


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())

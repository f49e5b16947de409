"""The secrets of one installation, made where they are missing: what a first `docker compose up` starts from.

Invariant: nothing that is valid is replaced, so every start may ask; each party's folder holds what it needs and
nothing of the others, and the keys that sign stay in `authority`. Called by `astraflow secrets`.
"""

import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from astraflow_launcher.issuing.authority import create_authority, issue_certificate
from astraflow_launcher.issuing.keys import create_keys, public_set_of
from astraflow_launcher.issuing.secret_files import write_file
from astraflow_launcher.issuing.tokens import Grant, describe_token, issue_token

_VALID = timedelta(days=365)
_RENEWED_BEFORE_END = timedelta(days=60)
# Folder of each party that calls, and the role of its token.
_CALLERS = {"trainer": "trainer", "raas": "rollout", "operator": "operator", "observe": "viewer"}
# Nodes are called by the host name that they have in common, and a number.
_NODES = {"raas": ("node-*",)}
# Who shows a certificate and verifies tokens.
_SERVERS = ("dataflow", "trainer", "raas")
_GROUP_READS = 0o640


def make_missing(folder: Path, *, names: Sequence[str], now: datetime | None = None) -> Iterator[str]:
    """Make what is missing below `folder`, and what ends within 60 days anew; yields what was made, in words.

    `names` are the host names that servers are called by. Raises InvalidArgumentError where it cannot write.
    """
    now = now or datetime.now(UTC)
    authority = folder / "authority"
    signing_key = authority / "signing.key"
    if not (authority / "ca.pem").exists():
        create_authority(authority, days=3650, now=now)
        yield "an authority"
    if not signing_key.exists():
        create_keys(signing_key)
        yield "the key that signs tokens"
    if _certificate_is_due(authority / "server.pem", names, now=now):
        for file in ("server.pem", "server.key"):
            (authority / file).unlink(missing_ok=True)
        issued = issue_certificate(
            authority, "server", dns=[*names, "localhost"], ips=["127.0.0.1"], days=_VALID.days, now=now
        )
        yield f"a certificate for {', '.join(issued.names)}, valid until {issued.not_after:%Y-%m-%d}"
    for party in _SERVERS:
        _copy(authority / "server.pem", folder / party / "tls.crt", secret=False)
        _copy(authority / "server.key", folder / party / "tls.key")
        _copy(public_set_of(signing_key), folder / party / "token-keys.json", secret=False)
    for party, role in _CALLERS.items():
        _copy(authority / "ca.pem", folder / party / "ca.crt", secret=False)
        if _token_is_due(folder / party / "token", now=now):
            grant = Grant(role=role, runs=("*",), subject=party, nodes=_NODES.get(party, ()))
            token = issue_token(grant, ttl=_VALID, key=signing_key, now=now)
            write_file(folder / party / "token", f"{token}\n".encode())
            yield f"a token of role {role}, valid until {now + _VALID:%Y-%m-%d}"
    yield from _passwords(folder)


def _passwords(folder: Path) -> Iterator[str]:
    """One for Valkey, which the dataflow server knows too, and one for the administrator of Grafana."""
    for place in (folder / "dataflow" / "valkey-password", folder / "observe" / "grafana-password"):
        if not place.exists():
            write_file(place, f"{secrets.token_urlsafe(32)}\n".encode())
            yield f"{place.name}"
    password = (folder / "dataflow" / "valkey-password").read_text().strip()
    write_file(folder / "valkey" / "valkey.conf", f"requirepass {password}\n".encode())
    for file in (
        "token",
        "grafana-password",
    ):  # Prometheus and Grafana run as users of their own, in this group
        (folder / "observe" / file).chmod(_GROUP_READS)


def _copy(source: Path, target: Path, *, secret: bool = True) -> None:
    content = source.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        write_file(target, content, secret=secret)


def _certificate_is_due(path: Path, names: Sequence[str], *, now: datetime) -> bool:
    if not path.exists() or not path.with_suffix(".key").exists():
        return True
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    missing = set(names) - set(known.get_values_for_type(x509.DNSName))
    return bool(missing) or certificate.not_valid_after_utc < now + _RENEWED_BEFORE_END


def _token_is_due(path: Path, *, now: datetime) -> bool:
    if not path.exists():
        return True
    ends = datetime.fromisoformat(describe_token(path.read_text().strip())["exp"])
    return ends < now + _RENEWED_BEFORE_END

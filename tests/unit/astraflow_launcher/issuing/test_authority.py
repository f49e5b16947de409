"""A development authority: what it issues is accepted, and nothing is overwritten or outlives it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import verification

from astraflow.errors import AstraflowError, ConflictError, InvalidArgumentError, NotFoundError
from astraflow_launcher.issuing.authority import create_authority, issue_certificate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", days=100)
    return tmp_path / "ca"


def verifier(folder: Path) -> verification.PolicyBuilder:
    """What a TLS library makes of certificates of this authority."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    return verification.PolicyBuilder().store(verification.Store([authority]))


def test_a_servers_certificate_is_for_its_names_and_addresses(folder: Path) -> None:
    issued = issue_certificate(folder, "dataflow", dns=["dataflow.example"], ips=["10.0.0.5"], days=10)
    leaf = x509.load_pem_x509_certificate(issued.certificate.read_bytes())
    for subject in (x509.DNSName("dataflow.example"), x509.IPAddress(ip_address("10.0.0.5"))):
        verifier(folder).build_server_verifier(subject).verify(leaf, [])
    with pytest.raises(verification.VerificationError):
        verifier(folder).build_server_verifier(x509.DNSName("other.example")).verify(leaf, [])
    with pytest.raises(verification.VerificationError):
        verifier(folder).build_client_verifier().verify(leaf, [])


def test_a_clients_certificate_needs_no_name(folder: Path) -> None:
    issued = issue_certificate(folder, "node", dns=["node"], client=True, days=10)
    verifier(folder).build_client_verifier().verify(
        x509.load_pem_x509_certificate(issued.certificate.read_bytes()), []
    )


def test_keys_are_readable_by_their_owner_only_and_certificates_by_all(folder: Path) -> None:
    issue_certificate(folder, "node", client=True, days=10)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert modes == {"ca.key": "0o600", "ca.pem": "0o644", "node.key": "0o600", "node.pem": "0o644"}


REFUSED: dict[str, tuple[Callable[[Path], object], type[AstraflowError], str]] = {
    "an authority in its place": (
        lambda folder: create_authority(folder, days=1),
        ConflictError,
        "not overwritten",
    ),
    "a name that is taken": (
        lambda folder: issue_certificate(folder, "ca", client=True, days=1),
        ConflictError,
        "ca.pem",
    ),
    "no authority": (
        lambda folder: issue_certificate(folder / "x", "n", client=True, days=1),
        NotFoundError,
        "astraflow ca create",
    ),
    "a server without names": (
        lambda folder: issue_certificate(folder, "n", days=1),
        InvalidArgumentError,
        "--dns",
    ),
    "an address with a port": (
        lambda folder: issue_certificate(folder, "n", ips=["10.0.0.5:1"], days=1),
        InvalidArgumentError,
        "no IP address",
    ),
    "a name with a port": (
        lambda folder: issue_certificate(folder, "n", dns=["h:1"], days=1),
        InvalidArgumentError,
        "without port",
    ),
    "a path for a name": (
        lambda folder: issue_certificate(folder, "../n", client=True, days=1),
        InvalidArgumentError,
        "name of a file",
    ),
    "an authority that has ended": (
        lambda folder: issue_certificate(
            folder, "n", client=True, days=1, now=datetime.now(UTC) + timedelta(days=101)
        ),
        InvalidArgumentError,
        "create a new one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_issued_is_refused_and_leaves_nothing(folder: Path, case: str) -> None:
    act, kind, says = REFUSED[case]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(kind, match=says):
        act(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("days", [100, 3650])
def test_a_certificate_ends_with_its_authority_at_the_latest(folder: Path, days: int) -> None:
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    issued = issue_certificate(folder, "n", client=True, days=days)
    assert (issued.not_after, issued.authority_ends) == (authority.not_valid_after_utc, True)


def test_a_key_of_another_authority_is_noticed(folder: Path, tmp_path: Path) -> None:
    create_authority(tmp_path / "other", days=1)
    (folder / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(InvalidArgumentError, match="is not the key of"):
        issue_certificate(folder, "n", client=True, days=1)


def test_a_certificate_is_valid_from_a_little_before_now(folder: Path) -> None:
    now = datetime.now(UTC)
    leaf = x509.load_pem_x509_certificate(
        issue_certificate(folder, "n", client=True, days=1, now=now).certificate.read_bytes()
    )
    assert timedelta(0) < now - leaf.not_valid_before_utc < timedelta(hours=1)

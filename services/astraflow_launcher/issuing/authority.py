"""A certificate authority for development and small installations: its own certificate, and those it issues.

Invariant: keys are P-256 and never overwritten; nothing that it issues outlives it. Called by `astraflow ca` and by
whatever makes the secrets of a first start.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from astraflow.errors import InvalidArgumentError, NotFoundError
from astraflow_launcher.issuing.secret_files import require_absent, write_file

_NAME = "ca"
# Clocks are a little apart; a certificate made now must be valid everywhere now.
_BACKDATED = timedelta(minutes=5)
_NO_USAGE = dict.fromkeys(
    (
        *(
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
        ),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path
    names: tuple[str, ...]
    not_after: datetime
    authority_ends: bool = False
    """Whether it would be valid for longer if its authority were."""


def create_authority(folder: Path, *, days: int, now: datetime | None = None) -> Issued:
    """Make an authority: `ca.pem`, which everybody may read, and `ca.key`, which signs.

    Raises ConflictError when there is one.
    """
    now = now or datetime.now(UTC)
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"AstraFlow development authority {folder.name}")]
    )
    key = generate_private_key(SECP256R1())
    own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _builder(subject, subject, key, now=now, not_after=now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**_NO_USAGE, "key_cert_sign": True, "crl_sign": True}), critical=True)
        .add_extension(own_id, critical=False)
    )
    return _written(folder, _NAME, builder.sign(key, hashes.SHA256()), key, names=())


def issue_certificate(
    folder: Path,
    name: str,
    *,
    dns: Sequence[str] = (),
    ips: Sequence[str] = (),
    client: bool = False,
    days: int,
    now: datetime | None = None,
) -> Issued:
    """Issue `NAME.pem` and `NAME.key` in the authority's folder: for a server with these names, or for a client; valid
    for so many days, or until the authority ends.

    Raises NotFoundError without an authority, ConflictError for a name that is taken, InvalidArgumentError for a server
    without names, something that is no name or address, or an authority that has ended.
    """
    now = now or datetime.now(UTC)
    authority, signing_key = _read_authority(folder)
    if not (dns or ips or client):
        raise InvalidArgumentError(
            "a server's certificate needs the names that callers use: --dns NAME, --ip ADDRESS; --client makes one "
            "for a client"
        )
    ends = authority.not_valid_after_utc
    if ends <= now:
        raise InvalidArgumentError(
            f"the authority in {folder} ended at {ends:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M} now; create "
            "a new one in another folder"
        )
    not_after = min(now + timedelta(days=days), ends)
    key = generate_private_key(SECP256R1())
    usage = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, authority.subject, key, now=now, not_after=not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**_NO_USAGE, "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
    )
    if names := _general_names(dns, ips):
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(signing_key, hashes.SHA256())
    return _written(folder, name, certificate, key, names=(*dns, *ips), authority_ends=not_after == ends)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, *, now: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(not_after)
    )


def _general_names(dns: Sequence[str], ips: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for name in dns:
        if not name.isascii() or not name or any(char in name for char in " :/"):
            raise InvalidArgumentError(
                f"--dns {name!r} is no DNS name: a name such as dataflow.example, without port"
            )
        names.append(x509.DNSName(name))
    for address in ips:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError as error:
            raise InvalidArgumentError(
                f"--ip {address!r} is no IP address, such as 10.0.0.5 or 2001:db8::1"
            ) from error
    return names


def _read_authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{_NAME}.pem").read_bytes())
        key = load_pem_private_key((folder / f"{_NAME}.key").read_bytes(), password=None)
    except OSError as error:
        raise NotFoundError(
            f"{folder} holds no authority ({error.strerror}: {error.filename}); make one: astraflow ca create {folder}"
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the authority in {folder} cannot be read: {error}") from error
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InvalidArgumentError(f"{folder / _NAME}.key is not the key of {folder / _NAME}.pem")
    return certificate, key


def _written(
    folder: Path,
    name: str,
    certificate: x509.Certificate,
    key: EllipticCurvePrivateKey,
    *,
    names: tuple[str, ...],
    authority_ends: bool = False,
) -> Issued:
    if not name or name != Path(name).name or name.startswith("."):
        raise InvalidArgumentError(f"{name!r} cannot be the name of a file; use letters, digits, - and .")
    pem, key_path = folder / f"{name}.pem", folder / f"{name}.key"
    require_absent(pem, key_path)
    write_file(key_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    write_file(pem, certificate.public_bytes(Encoding.PEM), secret=False)
    return Issued(
        certificate=pem,
        key=key_path,
        names=names,
        not_after=certificate.not_valid_after_utc,
        authority_ends=authority_ends,
    )

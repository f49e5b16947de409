"""Certificates of tests: a key and its own certificate for 127.0.0.1 and localhost."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

AnyKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def self_signed(
    folder: Path,
    *,
    name: str = "astraflow test",
    key: AnyKey | None = None,
    valid: timedelta = timedelta(days=1),
) -> dict[str, Path]:
    """The settings `tls_cert_file` and `tls_key_file` with files of a fresh pair that has been valid for an hour."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime.now(UTC) - timedelta(hours=1)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    addresses = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    certificate = (
        builder.not_valid_before(start)
        .not_valid_after(start + timedelta(hours=1) + valid)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .sign(key, hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None)
    )
    encoding = serialization.Encoding.PEM
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    paths = {"tls_cert_file": folder / "cert.pem", "tls_key_file": folder / "key.pem"}
    paths["tls_key_file"].write_bytes(secret)
    paths["tls_cert_file"].write_bytes(certificate.public_bytes(encoding))
    return paths

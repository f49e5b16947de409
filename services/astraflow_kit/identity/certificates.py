"""The certificate that a server shows, and the authority by which it knows its clients.

Invariant: a pair is in force only when key and certificate belong together; replacing the files replaces the pair
for the next connection. Built by the gRPC server and by the pages.
"""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.identity.watched import WatchedFiles
from astraflow_kit.join_settings import JoinSettings
from astraflow_kit.log import get_logger
from astraflow_kit.settings import DaemonSettings, SettingsError

log = get_logger(__name__)

EXPIRES_SOON_S = 7 * 86_400.0
"""From this long before its end on, a certificate is named in the log."""
RENEW = "issue a new pair (astraflow ca issue)"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate chain with its key, as PEM, and the authority of clients, empty when none is asked."""

    chain: bytes
    key: bytes
    client_ca: bytes
    expires_s: float


class ServerCertificate:
    """The pair that the settings name, read again when its files change."""

    def __init__(self, settings: DaemonSettings, *, clock: Clock | None = None) -> None:
        """Raises SettingsError for files that cannot be used: unreadable, of two pairs, expired."""
        cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
        if cert is None or key is None:
            raise ValueError("without tls_cert_file and tls_key_file there is no certificate")
        clock = clock or SystemClock()

        def parse(chain: bytes, key_pem: bytes, client_ca_pem: bytes = b"") -> Pair:
            return read_pair(
                chain, key_pem, client_ca_pem, where=(cert, key, client_ca), now_s=clock.wall_time_s()
            )

        self._clock = clock
        self._cert, self._key = cert, key
        self._files = WatchedFiles(cert, key, *([client_ca] if client_ca else []), parse=parse)

    def current(self) -> Pair:
        """The pair in force."""
        return self._files.current()

    def remaining_s(self) -> float:
        """How long the pair in force is still valid; negative when it is not any more."""
        return self.current().expires_s - self._clock.wall_time_s()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that show the pair in force at each handshake, TLS 1.2 or newer."""
        asks_clients = bool(self.current().client_ca)
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), self._grpc_configuration, asks_clients
        )

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = self.current()
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], pair.client_ca or None)

    def ssl_context(self) -> ssl.SSLContext:
        """The same for the pages, TLS 1.3."""
        in_force = self._context()

        def show_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal in_force
            pair = self.current()
            if pair is not in_force[0]:
                try:
                    in_force = self._context()
                except (
                    OSError,
                    SettingsError,
                ) as error:  # replaced again at this moment: the next one is shown it
                    log.warning("identity.certificate_not_shown", message=str(error))
            connection.context = in_force[1]

        first = in_force[1]
        first.sni_callback = show_current
        return first

    def _context(self) -> tuple[Pair, ssl.SSLContext]:
        pair = self.current()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Who resumes a session shows no certificate, so another authority of clients would not count for it.
        context.num_tickets = 0
        context.load_cert_chain(self._cert, self._key)
        if pair.client_ca:
            context.load_verify_locations(cadata=pair.client_ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return pair, context


def client_certificate_end(settings: DaemonSettings) -> WatchedFiles[float] | None:
    """When the certificate ends that a daemon shows to the servers it calls, in seconds since 1970, as its file is now;
    None for a daemon that shows none.
    """
    path = settings.client_cert_file if isinstance(settings, JoinSettings) else None
    if path is None:
        return None

    def parse(pem: bytes) -> float:
        (certificate, *_) = _certificates(pem, where=path, setting="client_cert_file")
        return certificate.not_valid_after_utc.timestamp()

    return WatchedFiles(path, parse=parse)


def read_pair(
    chain: bytes, key: bytes, client_ca: bytes, *, where: tuple[Path, Path, Path | None], now_s: float
) -> Pair:
    """A usable pair from PEM. Raises SettingsError naming the file of `where` that is wrong, and the remedy."""
    cert_file, key_file, client_ca_file = where
    certificate = _certificates(chain, where=cert_file)[0]
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"tls_key_file {key_file} is no PEM private key without password; {RENEW}"
        ) from error
    if isinstance(private, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
        raise SettingsError(
            f"tls_key_file {key_file} is an Edwards-curve key, which gRPC cannot show; "
            f"use ECDSA P-256 or RSA: {RENEW}"
        )
    described = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if private.public_key().public_bytes(*described) != certificate.public_key().public_bytes(*described):
        raise SettingsError(
            f"tls_key_file {key_file} does not belong to tls_cert_file {cert_file}: give the key that the certificate "
            f"was issued for, or {RENEW}"
        )
    expires = certificate.not_valid_after_utc
    if expires.timestamp() <= now_s:
        raise SettingsError(
            f"tls_cert_file {cert_file} expired at {expires:%Y-%m-%dT%H:%M:%SZ}, this server's clock says "
            f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%dT%H:%M:%SZ}; {RENEW}, or set the clock"
        )
    if client_ca_file is not None:
        _certificates(client_ca, where=client_ca_file, setting="tls_client_ca_file")
    return Pair(chain=chain, key=key, client_ca=client_ca, expires_s=expires.timestamp())


def _certificates(pem: bytes, *, where: Path, setting: str = "tls_cert_file") -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise SettingsError(f"{setting} {where} holds no PEM certificate; {RENEW}") from error

"""TLS for tests: an authority, certificates it issued, and a plain gRPC server that shows one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from astraflow_launcher.issuing.authority import Issued, create_authority, issue_certificate


@dataclass(frozen=True)
class Authority:
    """An authority in a folder of its own."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        """A new one, made years ago, so that it may have issued what has expired."""
        create_authority(folder, days=3650, now=datetime.now(UTC) - timedelta(days=365))
        return cls(folder)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return (self.folder / "ca.pem").read_bytes()

    def server(self, name: str = "server", *, hours: float = 0.0) -> Issued:
        """A certificate for 127.0.0.1 and localhost that was issued `hours` from now and is valid for a day."""
        now = datetime.now(UTC) + timedelta(hours=hours)
        return issue_certificate(self.folder, name, dns=["localhost"], ips=["127.0.0.1"], days=1, now=now)

    def client(self) -> Issued:
        """A client's certificate."""
        return issue_certificate(self.folder, "client", client=True, days=1)


@contextmanager
def tls_server(
    shown: Issued | None,
    *handlers: grpc.GenericRpcHandler,
    client_ca: bytes | None = None,
    address: str = "127.0.0.1:0",
) -> Iterator[str]:
    """A gRPC server, without services but of `handlers`, that shows a certificate, or speaks no TLS; yields its
    address.
    """
    server = grpc.server(ThreadPoolExecutor(4), list(handlers), options=[("grpc.so_reuseport", 0)])
    if shown is None:
        port = server.add_insecure_port(address)
    else:
        pair = (shown.key.read_bytes(), shown.certificate.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], client_ca, client_ca is not None)
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()

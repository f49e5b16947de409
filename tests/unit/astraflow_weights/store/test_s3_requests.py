"""What goes over the wire: small objects in one round trip, large ones when the service wants them."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.s3 import S3Store
from astraflow_weights.store.s3_requests import SENT_AT_ONCE_BYTES

_END_OF_HEADERS = b"\r\n\r\n"


class Service:
    """Takes one PUT and remembers its headers; it answers a question and a whole body."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.headers = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            received = b""
            while _END_OF_HEADERS not in received:
                received += connection.recv(2**16)
            self.headers, _, body = received.partition(_END_OF_HEADERS)
            size = next(
                int(line.split()[1])
                for line in self.headers.splitlines()
                if line.startswith(b"Content-Length")
            )
            if b"Expect" in self.headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = size - len(body)
            while left > 0:
                left -= len(connection.recv(2**16))
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

    def close(self) -> None:
        """Wait for the one PUT."""
        self._thread.join(timeout=60)
        self._server.close()


@pytest.fixture
def service() -> Iterator[Service]:
    serving = Service()
    yield serving
    serving.close()


@pytest.mark.parametrize(
    ("size", "asks"), [(0, False), (100, False), (SENT_AT_ONCE_BYTES, False), (SENT_AT_ONCE_BYTES + 1, True)]
)
def test_only_large_bodies_wait_for_a_yes(service: Service, tmp_path: Path, size: int, *, asks: bool) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    settings = StoreSettings(
        endpoint_url=f"http://127.0.0.1:{service.port}", region="us-east-1", credentials_file=credentials
    )
    S3Store(bucket="bucket", prefix="", settings=settings).put_if_absent("key", bytes(size))
    assert (b"Expect: 100-continue" in service.headers) is asks

"""What goes over the wire: small objects in one round trip, large ones when the service wants them."""

import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.s3 import S3Store
from astraflow_weights.store.s3_requests import SENT_AT_ONCE_BYTES


class OnePut(BaseHTTPRequestHandler):
    """Takes one PUT, whose headers it remembers; it answers a question and a whole body."""

    protocol_version = "HTTP/1.1"
    taken: ClassVar[list[Message]] = []

    def do_PUT(self) -> None:
        self.taken.append(self.headers)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        for name, value in {"ETag": '"e"', "Content-Length": "0", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def port() -> Iterator[int]:
    """Where the PUT is taken."""
    with HTTPServer(("127.0.0.1", 0), OnePut) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        yield server.server_port
        serving.join(timeout=60)


@pytest.mark.parametrize(
    ("size", "asks"), [(0, False), (100, False), (SENT_AT_ONCE_BYTES, False), (SENT_AT_ONCE_BYTES + 1, True)]
)
def test_only_large_bodies_wait_for_a_yes(port: int, tmp_path: Path, size: int, *, asks: bool) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    settings = StoreSettings(
        endpoint_url=f"http://127.0.0.1:{port}", region="us-east-1", credentials_file=credentials
    )
    S3Store(bucket="bucket", prefix="", settings=settings).put_if_absent("key", bytes(size))
    assert (OnePut.taken.pop()["Expect"] == "100-continue") is asks

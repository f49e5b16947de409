"""An S3 server (moto) as a process of its own on loopback, for tests.

`S3Server` is what tests use; the process runs this file. It serves one PUT at a time, because moto looks and writes
without a lock and would let two creators of one key win; `ignore_create_only` makes it the kind of store that must be
refused: it overwrites and says nothing. Requests need a signature, which moto does not check, and one in the address
must not have expired. Used by integration and e2e tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import boto3

from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore, open_store

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

IGNORE_CREATE_ONLY = "--ignore-create-only"
CREDENTIALS = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"


class S3Server:
    """One server process with empty buckets. Use as a context manager."""

    def __init__(self, folder: Path, *, ignore_create_only: bool = False) -> None:
        self.credentials_file = folder / "credentials"
        self.url = ""
        self._arguments = [IGNORE_CREATE_ONLY] if ignore_create_only else []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> S3Server:
        self.credentials_file.write_text(CREDENTIALS)
        command = [sys.executable, __file__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, f"moto ended with {self._process.wait(timeout=20)}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=20)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a daemon needs to use it."""
        return {
            "ASTRAFLOW_STORE_ENDPOINT_URL": self.url,
            "ASTRAFLOW_STORE_CREDENTIALS_FILE": str(self.credentials_file),
        }

    def settings(self, *, endpoint_url: str = "", **changes: float) -> StoreSettings:
        """How to talk to it; patient for a test, which is not patient at all."""
        merged: dict[str, Any] = {"max_attempts": 3, "backoff_s": 0.001} | changes
        merged |= {"region": "us-east-1", "credentials_file": self.credentials_file}
        return StoreSettings(endpoint_url=endpoint_url or self.url, **merged)

    def store(self, path: str, **settings: Any) -> ObjectStore:
        """The store below a bucket, or a prefix in one."""
        return open_store(f"s3://{path}", settings=self.settings(**settings))

    def client(self) -> S3Client:
        """A client of its own, to be closed."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)
        return name


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def one_put_at_a_time(application: Application, *, ignore_create_only: bool) -> Application:
    """Wrap moto so that of two creators of one key one wins, or, for the bad kind, both."""
    lock = threading.Lock()

    def wrapped(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not is_signed(environ):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [
                b"<Error><Code>AccessDenied</Code><Message>no signature, or one that expired</Message></Error>"
            ]
        if environ["REQUEST_METHOD"] != "PUT":
            return application(environ, start_response)
        if ignore_create_only:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with lock:
            return list(application(environ, start_response))

    return wrapped


def is_signed(environ: Mapping[str, Any]) -> bool:
    """Whether a request has credentials, or an address that was signed and has not expired."""
    query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
    if "X-Amz-Signature" not in query:
        return "HTTP_AUTHORIZATION" in environ
    signed = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return datetime.now(tz=UTC) < signed + timedelta(seconds=int(query["X-Amz-Expires"]))


def serve(*, ignore_create_only: bool = False, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve until killed, or until whoever started this is gone; the address is the first line of stdout."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)
    application = one_put_at_a_time(moto, ignore_create_only=ignore_create_only)
    server = make_server(host, port, application, threaded=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.write(f"http://{host}:{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def end_with_parent() -> None:
    """Wait for the end of stdin, which nobody writes to, and end."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    serve(ignore_create_only=IGNORE_CREATE_ONLY in sys.argv)

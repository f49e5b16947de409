"""An S3 store that is read through addresses which the dataflow server signs: for nodes without credentials.

Invariant: the process holds no key of the store, and an address is used for no more than three quarters of its life.
All else (ranges, retries, what errors mean) is `store.s3`'s. Opened by nodes that were granted it when they joined.
"""

import threading
import time
from collections import OrderedDict
from urllib.parse import parse_qs, unquote, urlsplit

from botocore.awsrequest import AWSPreparedRequest

from astraflow.errors import AstraflowError, RetryableError
from astraflow_weights.errors import StoreRefused
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.granted import ReadKind, SignReads, StoreRead
from astraflow_weights.store.s3 import S3Store
from astraflow_weights.store.s3_requests import Passing

_KNOWN = 4096
_USED_SHARE = 0.75
_KINDS = {"GET": ReadKind.GET, "HEAD": ReadKind.HEAD}


def open_signed_store(uri: str, *, sign: SignReads, settings: StoreSettings) -> S3Store:
    """Open `s3://bucket/prefix` for reading only; what would write raises StoreRefused. Sends no request."""
    address = urlsplit(uri)
    prefix = address.path.strip("/")
    # The address of the service is in what is signed; only the path of a request is read here.
    settings = settings.model_copy(update={"path_style": True, "profile": None, "credentials_file": None})
    signed = _SignedAddresses(sign, bucket=address.netloc, root=f"{prefix}/".lstrip("/"))
    return S3Store(bucket=address.netloc, prefix=prefix, settings=settings, signed=signed)


class _SignedAddresses:
    """The newest addresses. Thread-safe; two threads may ask for the same one."""

    def __init__(self, sign: SignReads, *, bucket: str, root: str) -> None:
        self._sign = sign
        self._bucket, self._root = bucket, root
        self._known: OrderedDict[StoreRead, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def redirect(self, request: AWSPreparedRequest, **_: object) -> None:
        request.url = self._address(self._read_of(request))

    def forget(self) -> None:
        with self._lock:
            self._known.clear()

    def _address(self, read: StoreRead) -> str:
        with self._lock:
            url, until_s = self._known.get(read, ("", 0.0))
        if time.monotonic() < until_s:
            return url
        asked_s = time.monotonic()
        try:
            answer = self._sign((read,))
        except RetryableError as error:
            raise Passing(f"no address to read it: {error.message}") from error
        except AstraflowError as error:
            raise StoreRefused(
                f"the dataflow server signs no address for {read.key!r}: {error.message}"
            ) from error
        with self._lock:
            self._known[read] = (answer.urls[0], asked_s + _USED_SHARE * answer.valid_s)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return answer.urls[0]

    def _read_of(self, request: AWSPreparedRequest) -> StoreRead:
        address = urlsplit(request.url)
        key = unquote(address.path).removeprefix(f"/{self._bucket}").lstrip("/")
        kind = _KINDS.get(request.method)
        if kind is None:
            raise StoreRefused(
                f"{key.removeprefix(self._root)!r} cannot be written: the dataflow server granted this node only reads"
            )
        if key:
            return StoreRead(kind=kind, key=key.removeprefix(self._root))
        asked = {name: values[0] for name, values in parse_qs(address.query).items()}
        prefix, after = asked.get("prefix", ""), asked.get("start-after", "")
        return StoreRead(
            kind=ReadKind.LIST, key=prefix.removeprefix(self._root), after=after.removeprefix(self._root)
        )

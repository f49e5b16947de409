"""An object store over the S3 protocol.

Invariant: of S3 it needs GET, PUT with `If-None-Match: *`, HEAD, LIST and DELETE, and uploads in pieces for large
objects that are named by their content; it never needs an overwrite or the end of such an upload to be conditional.
Opened by `store.open_store`; requests and retries are in `store.s3_requests`, large objects in `store.s3_transfers`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError

from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import ObjectNotFound, StoreRefused
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectInfo, PutResult
from astraflow_weights.store.layout import check_key
from astraflow_weights.store.s3_requests import (
    EXISTS,
    NOT_FOUND,
    OWN_BUCKET,
    REFUSED_STATUS,
    Passing,
    Requests,
    SignedRequests,
    code_of,
    status_of,
)
from astraflow_weights.store.s3_transfers import Transfers, body_of, read_body

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CreateBucketConfigurationTypeDef, ListObjectsV2OutputTypeDef


class S3Store:
    """`ObjectStore` over a bucket; see there for the contract."""

    def __init__(
        self, *, bucket: str, prefix: str, settings: StoreSettings, signed: SignedRequests | None = None
    ) -> None:
        """Sends no request. Raises StoreRefused for an unknown profile, a malformed endpoint or prefix.

        With `signed` it can only be read, through addresses that somebody else signs.
        """
        self._bucket = bucket
        self._prefix = _checked_prefix(prefix, bucket=bucket)
        self._settings = settings
        self._requests = Requests(settings, uri=self.uri, signed=signed)
        self._client = self._requests.client
        pool = ThreadPoolExecutor(settings.transfer_threads, thread_name_prefix="weights-transfer")
        self._transfers = Transfers(self._requests, pool, settings, bucket=bucket)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        large = len(data) > self._settings.multipart_threshold_bytes
        if large and sha256(data).hex() in key.rpartition("/")[2]:  # named by its content
            return self._create_in_pieces(key, data)
        return self._requests.repeat(lambda attempt: self._create(key, data, attempt=attempt), key=key)

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        self._requests.repeat(
            lambda _: self._client.put_object(Bucket=self._bucket, Key=name, Body=data), key=key
        )

    def get(self, key: str) -> bytes:
        return self._transfers.read(self._name(key), key=key)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        if start < 0 or length < 0:
            raise ValueError(f"range start {start} and length {length} must not be negative")
        if length == 0:
            self.head(key)
            return b""
        return self._transfers.read(self._name(key), key=key, start=start, length=length)

    def head(self, key: str) -> ObjectInfo:
        name = self._name(key)
        answer = self._requests.repeat(
            lambda _: self._client.head_object(Bucket=self._bucket, Key=name), key=key
        )
        return ObjectInfo(key=key, size_bytes=answer["ContentLength"])

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        last = after
        while True:
            page = self._page(prefix, after=last)
            for item in page.get("Contents", ()):
                last = item["Key"].removeprefix(self._prefix)
                yield ObjectInfo(key=last, size_bytes=item["Size"])
            if not page.get("IsTruncated") or not page.get("Contents"):
                return

    def make_bucket(self) -> bool:
        """Create the bucket when it is missing; whether it was. Raises StoreRefused when that is not allowed."""
        try:
            self._requests.repeat(lambda _: self._client.head_bucket(Bucket=self._bucket), key="")
        except ObjectNotFound:
            self._requests.repeat(lambda _: self._create_bucket(), key="")
            return True
        except StoreRefused:
            return False  # there, for all that these credentials may know of it: using it will tell
        return False

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._requests.repeat(lambda _: self._client.delete_object(Bucket=self._bucket, Key=name), key=key)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _page(self, prefix: str, *, after: str) -> "ListObjectsV2OutputTypeDef":
        return self._requests.repeat(lambda _: self._list_once(prefix, after=after), key=prefix)

    def _list_once(self, prefix: str, *, after: str) -> "ListObjectsV2OutputTypeDef":
        page = self._client.list_objects_v2(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            StartAfter=self._prefix + after if after else "",
        )
        if "IsTruncated" not in page:
            raise Passing("the answer is no listing; something between here and the store made it")
        return page

    def _create_bucket(self) -> None:
        region = self._client.meta.region_name
        elsewhere = self._settings.endpoint_url is None and region != "us-east-1"
        where: CreateBucketConfigurationTypeDef = {"LocationConstraint": cast("Any", region)}
        try:
            if elsewhere:
                self._client.create_bucket(Bucket=self._bucket, CreateBucketConfiguration=where)
            else:
                self._client.create_bucket(Bucket=self._bucket)
        except ClientError as error:
            if code_of(error) in OWN_BUCKET:
                return
            if status_of(error) not in REFUSED_STATUS:
                raise
            raise StoreRefused(
                f"{self.uri}: there is no bucket {self._bucket!r}, and it could not be created ({code_of(error)}); "
                "create it, correct its name, or use credentials that may create buckets"
            ) from error

    def _create_in_pieces(self, key: str, data: bytes) -> PutResult:
        try:
            self.head(key)
        except ObjectNotFound:
            self._transfers.send_in_pieces(self._name(key), data, key=key)
            return PutResult.CREATED
        return PutResult.EXISTS

    def _create(self, key: str, data: bytes, *, attempt: int) -> PutResult:
        try:
            answer = self._client.put_object(
                Bucket=self._bucket, Key=self._name(key), Body=body_of(data, self._settings), IfNoneMatch="*"
            )
        except ClientError as error:
            if code_of(error) not in EXISTS:
                raise
            # On a repeated attempt the object may be what an earlier, unanswered attempt of this call wrote.
            return PutResult.CREATED if attempt and self._holds(key, data) else PutResult.EXISTS
        if not answer.get("ETag"):
            raise Passing("the answer is not a store's; something between here and the store made it")
        return PutResult.CREATED

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            if code_of(error) in NOT_FOUND:
                raise Passing("the object that stood in the way is gone") from error
            raise
        return answer["ContentLength"] == len(data) and read_body(answer, self._settings) == data


def _checked_prefix(prefix: str, *, bucket: str) -> str:
    try:
        return f"{check_key(prefix)}/" if prefix else ""
    except ValueError as error:
        raise StoreRefused(f"store address s3://{bucket}/{prefix}: {error}") from error

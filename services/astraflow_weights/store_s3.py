"""An object store over the S3 protocol; the only module that imports boto3.

Invariant: of S3 it needs GET, PUT with `If-None-Match: *`, HEAD, LIST and DELETE, and it never needs an
overwrite to be conditional. It does its own retries, because after an unclear answer to a create-only PUT
only reading back tells who won. Opened by `store.open_store`.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError

from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.layout import check_key
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectInfo, PutResult

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_NOT_FOUND = frozenset({"NoSuchKey", "404", "NotFound"})
_EXISTS = frozenset({"PreconditionFailed", "412"})
_REFUSED_STATUS = frozenset({400, 401, 403, 404, 405, 501})
_REMEDIES = {
    "NoSuchBucket": "create the bucket or correct its name; check bucket name, endpoint_url and region",
    "AccessDenied": "let these credentials get, put, list and delete below the prefix",
    "InvalidAccessKeyId": "correct the credentials; check store_credentials_file or the default chain",
    "SignatureDoesNotMatch": "correct the credentials; check store_credentials_file or the default chain",
    "NotImplemented": "use a store that supports PUT with `If-None-Match: *`",
}
_ANY_REMEDY = "check bucket name, endpoint_url, region and credentials"
# Answered with 400 when the network, not the request, was at fault.
_PASSING = frozenset({"RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"})
_RANGE_PAST_END = 416
_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, ProfileNotFound)
# Nothing, or not everything, came back: the request may have been carried out.
_UNCERTAIN_ERRORS = (BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError)

T = TypeVar("T")


class _Passing(Exception):
    """A fault that may be gone at the next attempt."""


class S3Store:
    """`ObjectStore` over a bucket; see there for the contract."""

    def __init__(self, *, bucket: str, prefix: str, settings: StoreSettings) -> None:
        """Sends no request. Raises StoreRefused for an unknown profile, a malformed endpoint or prefix."""
        self._bucket = bucket
        self._prefix = _checked_prefix(prefix, bucket=bucket)
        self._settings = settings
        self._client = _client(settings)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        return self._repeat(lambda attempt: self._create(key, data, attempt=attempt), key=key)

    def put(self, key: str, data: bytes) -> None:
        name = self._name(key)
        self._repeat(lambda _: self._client.put_object(Bucket=self._bucket, Key=name, Body=data), key=key)

    def get(self, key: str) -> bytes:
        name = self._name(key)
        return self._repeat(
            lambda _: self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read(), key=key
        )

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        if start < 0 or length < 0:
            raise ValueError(f"range start {start} and length {length} must not be negative")
        if length == 0:
            self.head(key)
            return b""
        return self._repeat(lambda _: self._read_range(key, start=start, length=length), key=key)

    def head(self, key: str) -> ObjectInfo:
        name = self._name(key)
        answer = self._repeat(lambda _: self._client.head_object(Bucket=self._bucket, Key=name), key=key)
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

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._repeat(lambda _: self._client.delete_object(Bucket=self._bucket, Key=name), key=key)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _page(self, prefix: str, *, after: str) -> "ListObjectsV2OutputTypeDef":
        return self._repeat(lambda _: self._list_once(prefix, after=after), key=prefix)

    def _list_once(self, prefix: str, *, after: str) -> "ListObjectsV2OutputTypeDef":
        page = self._client.list_objects_v2(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            StartAfter=self._prefix + after if after else "",
        )
        if "IsTruncated" not in page:
            raise _Passing("the answer is no listing; something between here and the store made it")
        return page

    def _create(self, key: str, data: bytes, *, attempt: int) -> PutResult:
        try:
            answer = self._client.put_object(
                Bucket=self._bucket, Key=self._name(key), Body=data, IfNoneMatch="*"
            )
        except ClientError as error:
            if _code(error) not in _EXISTS:
                raise
            # On a repeated attempt the object may be what an earlier, unanswered attempt of this call wrote.
            return PutResult.CREATED if attempt and self._holds(key, data) else PutResult.EXISTS
        if not answer.get("ETag"):
            raise _Passing("the answer is not a store's; something between here and the store made it")
        return PutResult.CREATED

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            if _code(error) in _NOT_FOUND:
                raise _Passing("the object that stood in the way is gone") from error
            raise
        return answer["ContentLength"] == len(data) and answer["Body"].read() == data

    def _read_range(self, key: str, *, start: int, length: int) -> bytes:
        span = f"bytes={start}-{start + length - 1}"
        try:
            return self._client.get_object(Bucket=self._bucket, Key=self._name(key), Range=span)[
                "Body"
            ].read()
        except ClientError as error:
            if _status(error) == _RANGE_PAST_END:
                return b""
            raise

    def _repeat(self, operation: Callable[[int], T], *, key: str) -> T:
        attempts = self._settings.max_attempts
        for attempt in range(attempts):
            try:
                return self._once(operation, attempt=attempt, key=key)
            except _Passing as fault:
                if attempt == attempts - 1:
                    raise Unavailable(
                        f"{self.uri}: {key!r} failed {attempts} times, last: {fault}; check that the store "
                        f"at {self._settings.endpoint_url or 'AWS'} is healthy and can be reached"
                    ) from fault.__cause__
            self._wait(attempt)
        raise AssertionError("the loop returns or raises: max_attempts is at least 1")

    def _once(self, operation: Callable[[int], T], *, attempt: int, key: str) -> T:
        try:
            return operation(attempt)
        except ClientError as error:
            raise self._translated(error, key=key) from error
        except _CREDENTIAL_ERRORS as error:
            raise StoreRefused(
                f"{self.uri}: {error}; give store_credentials_file or set up the default chain"
            ) from error
        except _UNCERTAIN_ERRORS as error:
            raise _Passing(str(error)) from error
        except BotoCoreError as error:
            raise StoreRefused(f"{self.uri}: {error}; {_ANY_REMEDY}") from error

    def _translated(self, error: ClientError, *, key: str) -> Exception:
        code, status = _code(error), _status(error)
        if code in _NOT_FOUND:
            return ObjectNotFound(f"{self.uri} has no object {key!r}")
        if status in _REFUSED_STATUS and code not in _PASSING:
            remedy = _REMEDIES.get(code, _ANY_REMEDY)
            return StoreRefused(f"{self.uri}: {code} ({status}) at {key!r}; {remedy}")
        return _Passing(f"{code} ({status})")

    def _wait(self, attempt: int) -> None:
        # Full jitter: many nodes that fail together must not return together.
        longest = min(self._settings.backoff_s * 2**attempt, self._settings.backoff_max_s)
        time.sleep(random.uniform(0, longest))


def _client(settings: StoreSettings) -> "S3Client":
    core = botocore.session.Session(profile=settings.profile)
    if settings.credentials_file is not None:
        core.set_config_variable("credentials_file", str(settings.credentials_file))
    try:
        session = boto3.Session(botocore_session=core)
        region = settings.region or session.region_name or "us-east-1"
        return session.client(
            "s3", endpoint_url=settings.endpoint_url, region_name=region, config=_config(settings)
        )
    except ProfileNotFound as error:
        raise StoreRefused(f"{error}; name a profile of the credentials file") from error
    except ValueError as error:  # botocore's own answer to an endpoint that is no address
        raise StoreRefused(
            f"store endpoint {settings.endpoint_url!r} is not understood ({error}); use http://HOST:PORT or https://HOST"
        ) from error


def _checked_prefix(prefix: str, *, bucket: str) -> str:
    try:
        return f"{check_key(prefix)}/" if prefix else ""
    except ValueError as error:
        raise StoreRefused(f"store address s3://{bucket}/{prefix}: {error}") from error


def _config(settings: StoreSettings) -> Config:
    return Config(
        s3={"addressing_style": "path" if settings.path_style else "virtual"},
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        max_pool_connections=settings.max_connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Other stores than AWS reject or ignore the newer checksum headers; parts carry their own sha256.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))

"""Requests to an S3 service: the client, what its errors mean, and the retries.

Invariant: every request is tried a bounded number of times, with full jitter between; whatever the service or the
network does ends as an answer, Unavailable, StoreRefused or ObjectNotFound. boto3 repeats nothing itself, because
after an unclear answer to a create-only PUT only reading back tells who won. `store.s3` and `store.s3_transfers` call.
"""

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import boto3
import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest
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
from botocore.utils import determine_content_length
from urllib3.exceptions import HTTPError

from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.settings import StoreSettings

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

NOT_FOUND = frozenset({"NoSuchKey", "404", "NotFound"})
EXISTS = frozenset({"PreconditionFailed", "412"})
OWN_BUCKET = frozenset({"BucketAlreadyOwnedByYou", "BucketAlreadyExists"})
REFUSED_STATUS = frozenset({400, 401, 403, 404, 405, 501})
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
RANGE_PAST_END, FORBIDDEN = 416, 403
SENT_AT_ONCE_BYTES = 2**20
"""Bodies up to this are sent with their headers; a larger one when the service has said that it wants it."""
_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, ProfileNotFound)
# Nothing, or not everything, came back: the request may have been carried out.
_UNCERTAIN_ERRORS = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    HTTPError,
    ResponseParserError,
)

T = TypeVar("T")


class Passing(Exception):
    """A fault that may be gone at the next attempt."""


class Requests:
    """The client of one bucket, and how its operations are repeated. Thread-safe."""

    def __init__(self, settings: StoreSettings, *, uri: str, signed: "SignedRequests | None" = None) -> None:
        """Sends no request. Raises StoreRefused for an unknown profile or a malformed endpoint.

        With `signed`, requests go to addresses that somebody else signed, without credentials.
        """
        self.client = open_client(open_session(settings), settings, unsigned=signed is not None)
        self._settings = settings
        self._uri = uri
        self._signed = signed
        if signed is not None:
            self.client.meta.events.register("before-send.s3", signed.redirect)

    def repeat(self, operation: Callable[[int], T], *, key: str) -> T:
        """The answer of `operation`, which is given the number of its attempt and may raise Passing."""
        attempts = self._settings.max_attempts
        for attempt in range(attempts):
            try:
                return self._once(operation, attempt=attempt, key=key)
            except Passing as fault:
                if attempt == attempts - 1:
                    raise Unavailable(
                        f"{self._uri}: {key!r} failed {attempts} times, last: {fault}; check that the store "
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
                f"{self._uri}: {error}; give store_credentials_file or set up the default chain"
            ) from error
        except _UNCERTAIN_ERRORS as error:
            raise Passing(str(error)) from error
        except BotoCoreError as error:
            raise StoreRefused(f"{self._uri}: {error}; {_ANY_REMEDY}") from error

    def _translated(self, error: ClientError, *, key: str) -> Exception:
        code, status = code_of(error), status_of(error)
        if self._signed is not None and status == FORBIDDEN:
            # Signed too long ago, most likely: the next attempt asks anew, and the last one says what the store said.
            self._signed.forget()
            return Passing(f"{code} ({status}) for an address that the dataflow server signed")
        if code in NOT_FOUND:
            return ObjectNotFound(f"{self._uri} has no object {key!r}")
        if status in REFUSED_STATUS and code not in _PASSING:
            remedy = _REMEDIES.get(code, _ANY_REMEDY)
            return StoreRefused(f"{self._uri}: {code} ({status}) at {key!r}; {remedy}")
        return Passing(f"{code} ({status})")

    def _wait(self, attempt: int) -> None:
        # Full jitter: many nodes that fail together must not return together.
        longest = min(self._settings.backoff_s * 2**attempt, self._settings.backoff_max_s)
        time.sleep(random.uniform(0, longest))


class SignedRequests(Protocol):
    """Where requests go whose addresses somebody else signs."""

    def redirect(self, request: AWSPreparedRequest, **_: object) -> None:
        """Give the request its signed address. Raises Passing, StoreRefused."""

    def forget(self) -> None:
        """The store refused an address: use none of those that are known."""


def open_session(settings: StoreSettings) -> boto3.Session:
    """Return who asks. Raises StoreRefused for an unknown profile."""
    core = botocore.session.Session(profile=settings.profile)
    if settings.credentials_file is not None:
        core.set_config_variable("credentials_file", str(settings.credentials_file))
    try:
        return boto3.Session(botocore_session=core)
    except ProfileNotFound as error:
        raise StoreRefused(f"{error}; name a profile of the credentials file") from error


def open_client(session: boto3.Session, settings: StoreSettings, *, unsigned: bool = False) -> "S3Client":
    """Return a client. Sends no request. Raises StoreRefused for a malformed endpoint."""
    config = _config(settings).merge(Config(signature_version=UNSIGNED if unsigned else "s3v4"))
    try:
        region = settings.region or session.region_name or "us-east-1"
        client = session.client("s3", endpoint_url=settings.endpoint_url, region_name=region, config=config)
    except ValueError as error:  # botocore's own answer to an endpoint that is no address
        raise StoreRefused(
            f"store endpoint {settings.endpoint_url!r} is not understood ({error}); use http://HOST:PORT or https://HOST"
        ) from error
    client.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
    return client


def _send_small_bodies_at_once(params: dict[str, Any], **_: object) -> None:
    """The library asks before every body (`Expect: 100-continue`), and waits a second where nobody answers that."""
    if (determine_content_length(params.get("body")) or 0) <= SENT_AT_ONCE_BYTES:
        params["headers"].pop("Expect", None)


def _config(settings: StoreSettings) -> Config:
    return Config(
        s3={"addressing_style": "path" if settings.path_style else "virtual"},
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        max_pool_connections=settings.max_connections,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation=settings.checksum_mode
        or ("when_required" if settings.endpoint_url else "when_supported"),
        # Whoever reads compares with the sha256 of a reference; some services send a whole object's checksum
        # with a range of it.
        response_checksum_validation="when_required",
    )


def code_of(error: ClientError) -> str:
    """The service's name for an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """The HTTP status of an error."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))

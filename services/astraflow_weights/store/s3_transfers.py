"""Large objects to and from an S3 service: in pieces, several at a time, never slower than is worth waiting for.

Invariant: a read returns bytes of one and the same object, and an upload in pieces is seen whole or not at all. Each
piece and each range is repeated on its own. Services do not offer a conditional end of an upload in pieces, so
`store.s3` uses it only for objects that are named by their content: whoever else ends one wrote the same bytes.
"""

import base64
import hashlib
import io
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from botocore.exceptions import BotoCoreError, ClientError

from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.s3_requests import (
    NOT_FOUND,
    RANGE_PAST_END,
    SENT_AT_ONCE_BYTES,
    Passing,
    Requests,
    code_of,
    status_of,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef, GetObjectOutputTypeDef
    from urllib3.response import BaseHTTPResponse

_CHUNK_BYTES = 2**18
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# The upload in pieces is gone, or is not what was sent: it ended, or the service dropped it.
_LOST_UPLOAD = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder"})
_NOT_A_STORE = "the answer is not a store's; something between here and the store made it"

T = TypeVar("T")


class _UploadLost(Exception):
    """The service does not know the upload in pieces any more; it must begin anew."""


class Progress:
    """Raises Passing from `moved` when fewer than `progress_bytes` move per `progress_window_s`."""

    def __init__(self, settings: StoreSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = settings.progress_bytes
        self._window_s = settings.progress_window_s
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a window now."""
        self._since, self._bytes = self._clock(), 0

    def moved(self, num_bytes: int) -> None:
        """Count bytes that moved."""
        self._bytes += num_bytes
        passed = self._clock() - self._since
        if passed < self._window_s:
            return
        # By its rate: a call that waits long may end with one burst of what a buffer holds.
        if self._bytes * self._window_s < self._least * passed:
            raise Passing(
                f"{self._bytes} bytes moved in {passed:.1f} s, less than {self._least} in {self._window_s:g} s"
            )
        self.restart()


class _WatchedBody(io.BytesIO):
    """The body of an upload; the library reads it block by block as the socket takes it."""

    def __init__(self, data: bytes, progress: Progress) -> None:
        super().__init__(data)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(size)
        self._progress.moved(len(block))
        return block

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        # The library reads all for the signature, then goes back to send it.
        self._progress.restart()
        return super().seek(offset, whence)


def body_of(data: bytes, settings: StoreSettings) -> bytes | io.BytesIO:
    """What to hand to a request that sends `data`."""
    return data if len(data) <= SENT_AT_ONCE_BYTES else _WatchedBody(data, Progress(settings))


def read_body(answer: "GetObjectOutputTypeDef", settings: StoreSettings) -> bytes:
    """The content of an answer. Raises Passing when it is cut or too slow."""
    progress, chunks, left = Progress(settings), [], answer["ContentLength"]
    with answer["Body"] as stream:
        raw = cast("BaseHTTPResponse", stream)
        while left > 0:
            # One read of the socket, which waits `read_timeout_s` at most.
            chunk = raw.read1(min(left, _CHUNK_BYTES), decode_content=False)
            if not chunk:
                raise Passing(f"the answer ended {left} bytes early")
            chunks.append(chunk)
            left -= len(chunk)
            progress.moved(len(chunk))
    return b"".join(chunks)


@dataclass(frozen=True)
class _Range:
    """What one request for a range brought: bytes from `start` of an object of `total` bytes."""

    start: int
    data: bytes
    total: int
    tag: str


class Transfers:
    """Reads and sends large objects of one bucket. Thread-safe."""

    def __init__(self, requests: Requests, pool: Executor, settings: StoreSettings, *, bucket: str) -> None:
        """`pool` runs pieces and ranges, never whole transfers, so none waits for another."""
        self._requests = requests
        self._client = requests.client
        self._pool = pool
        self._settings = settings
        self._bucket = bucket

    def read(self, name: str, *, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of an object, cut at its end; all from `start` without `length`."""
        return self._requests.repeat(lambda _: self._read(name, key, start, length), key=key)

    def send_in_pieces(self, name: str, data: bytes, *, key: str) -> None:
        """Store `data`, whatever is there; it is seen when all has arrived."""
        self._requests.repeat(lambda _: self._send(name, data, key), key=key)

    def _read(self, name: str, key: str, start: int, length: int | None) -> bytes:
        step = self._settings.range_bytes
        first = self._range(name, key, start, step if length is None else min(length, step))
        end = first.total if length is None else min(start + length, first.total)
        begins = range(start + len(first.data), end, step)
        rest = self._gather(lambda begin: self._range(name, key, begin, min(step, end - begin)), begins)
        if any((piece.tag, piece.total) != (first.tag, first.total) for piece in rest):
            raise Passing("the object was replaced while it was read")
        return b"".join([first.data, *(piece.data for piece in rest)])

    def _range(self, name: str, key: str, start: int, length: int) -> _Range:
        return self._requests.repeat(lambda _: self._range_once(name, start, length), key=key)

    def _range_once(self, name: str, start: int, length: int) -> _Range:
        span = f"bytes={start}-{start + length - 1}"
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=span)
        except ClientError as error:
            if status_of(error) == RANGE_PAST_END:
                return _Range(start, b"", start, "")
            raise
        data, tag, content_range = (
            read_body(answer, self._settings),
            answer.get("ETag", ""),
            answer.get("ContentRange"),
        )
        if not tag:
            raise Passing(_NOT_A_STORE)
        if content_range is None:  # a service or cache that knows no ranges sent the whole object
            return _Range(start, data[start : start + length], len(data), tag)
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None or int(found[1]) != start or int(found[2]) + 1 != start + len(data):
            raise Passing(f"asked for {span!r}, the answer has {content_range!r} and {len(data)} bytes")
        total = int(found[3])
        if len(data) != min(length, total - start):
            raise Passing(f"asked for {span!r} of {total} bytes, the answer has {len(data)}")
        return _Range(start, data, total, tag)

    def _send(self, name: str, data: bytes, key: str) -> None:
        upload = self._requests.repeat(lambda _: self._begin(name), key=key)
        try:
            pieces = self._send_pieces(name, data, key, upload)
            self._requests.repeat(lambda _: self._finish(name, upload, pieces, len(data)), key=key)
        except _UploadLost as error:
            raise Passing(str(error)) from error
        except BaseException as error:
            self._abort(name, upload, error)
            raise

    def _begin(self, name: str) -> str:
        upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=name).get("UploadId")
        if not upload:
            raise Passing(_NOT_A_STORE)
        return upload

    def _send_pieces(self, name: str, data: bytes, key: str, upload: str) -> "list[CompletedPartTypeDef]":
        step, whole = self._settings.multipart_piece_bytes, memoryview(data)

        def send(start: int) -> "CompletedPartTypeDef":
            number, piece = start // step + 1, bytes(whole[start : start + step])
            return self._requests.repeat(lambda _: self._send_piece(name, upload, number, piece), key=key)

        return self._gather(send, range(0, len(data), step))

    def _send_piece(self, name: str, upload: str, number: int, data: bytes) -> "CompletedPartTypeDef":
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        try:
            answer = self._client.upload_part(
                Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number,
                Body=body_of(data, self._settings), ContentMD5=digest,
            )  # fmt: skip
        except ClientError as error:
            raise _lost_or(error) from error
        if not answer.get("ETag"):
            raise Passing(_NOT_A_STORE)
        return {"ETag": answer["ETag"], "PartNumber": number}

    def _finish(self, name: str, upload: str, pieces: "list[CompletedPartTypeDef]", size: int) -> None:
        lost: Exception | None = None
        try:
            self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": pieces}
            )
        except ClientError as error:
            lost = _lost_or(error)
            if not isinstance(lost, _UploadLost):
                raise
        # An earlier attempt whose answer was lost may have ended it, and an answer proves nothing by itself.
        stored = self._size(name)
        if stored != size:
            raise lost or Passing(f"{size} bytes were sent and {stored} are stored")

    def _size(self, name: str) -> int | None:
        try:
            return self._client.head_object(Bucket=self._bucket, Key=name)["ContentLength"]
        except ClientError as error:
            if code_of(error) in NOT_FOUND:
                return None
            raise

    def _abort(self, name: str, upload: str, why: BaseException) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)
        except (BotoCoreError, ClientError) as error:
            why.add_note(f"pieces of the upload {upload} stay until the bucket's rules remove them: {error}")

    def _gather(self, job: Callable[[int], T], starts: Iterable[int]) -> list[T]:
        futures = [self._pool.submit(job, start) for start in starts]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def _lost_or(error: ClientError) -> Exception:
    if code_of(error) in _LOST_UPLOAD:
        return _UploadLost(f"the service lost the upload ({code_of(error)})")
    return error

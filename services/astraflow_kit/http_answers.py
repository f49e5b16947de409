"""Answers of HTTP servers that somebody else runs, read to a limit: what is more is refused, unread.

Invariant: no answer costs more memory than its limit, however it is compressed. httpx is not imported: not every daemon
has it.
"""

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

_INFLATED = ("gzip", "x-gzip", "deflate")


class AnswerRefused(OSError):
    """An answer is longer than its reader takes, or compressed in a way that nobody asked for."""


async def post_json(
    client: "httpx.AsyncClient", url: str, content: object, *, max_bytes: int
) -> "httpx.Response":
    """POST and return the whole answer. Raises AnswerRefused, httpx.HTTPError."""
    async with client.stream("POST", url, json=content, headers={"accept-encoding": "identity"}) as answer:
        coding = answer.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *_INFLATED):
            raise AnswerRefused(f"{url} answered in the encoding {coding!r}; identity was asked for")
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if coding in _INFLATED else None
        body = bytearray()
        async for chunk in answer.aiter_raw():
            try:
                body += inflate.decompress(chunk, max_bytes + 1 - len(body)) if inflate else chunk
            except zlib.error as error:
                raise AnswerRefused(f"{url} answered what is not {coding}: {error}") from error
            if len(body) > max_bytes:
                raise AnswerRefused(f"{url} answered more than {max_bytes} bytes; have it answer less")
        if inflate and not inflate.eof:
            raise AnswerRefused(f"{url} answered what is not {coding}: it ends too early")
        kept = {
            name: answer.headers[name] for name in ("content-type", "retry-after") if name in answer.headers
        }
        return type(answer)(answer.status_code, headers=kept, content=bytes(body), request=answer.request)

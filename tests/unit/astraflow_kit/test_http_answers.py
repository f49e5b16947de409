"""What a server of somebody else answers is read to its limit, compressed or not, and no byte more is kept."""

import gzip
import tracemalloc
import zlib
from collections.abc import Mapping

import httpx
import pytest

from astraflow_kit.http_answers import AnswerRefused, post_json
from support.http_server import answering

LIMIT = 1000
BOMB = 64 * 2**20


async def posted(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await post_json(client, url, {"x": 1}, max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"x" * LIMIT, {}),
        (gzip.compress(b"x" * LIMIT, mtime=0), {"content-encoding": "gzip"}),
        (zlib.compress(b"x" * LIMIT), {"content-encoding": "deflate"}),
    ],
)
async def test_an_answer_of_the_limit_is_whole(body: bytes, headers: Mapping[str, str]) -> None:
    with answering(body, status=404, headers={"retry-after": "3", **headers}) as url:
        answer = await posted(url)
    assert (answer.status_code, answer.headers["retry-after"], answer.text) == (404, "3", "x" * LIMIT)


@pytest.mark.parametrize(
    ("body", "times", "headers", "complaint"),
    [
        (b"x" * (LIMIT + 1), 1, {}, "answered more than 1000 bytes"),
        (b"x" * 2**20, 10**6, {}, "answered more than 1000 bytes"),
        (gzip.compress(b"x" * (LIMIT + 1), mtime=0), 1, {"content-encoding": "gzip"}, "more than 1000 bytes"),
        (gzip.compress(bytes(BOMB), mtime=0), 1, {"content-encoding": "gzip"}, "more than 1000 bytes"),
        (zlib.compress(bytes(BOMB)), 1, {"content-encoding": "deflate"}, "more than 1000 bytes"),
        (b"x", 1, {"content-encoding": "gzip"}, "what is not gzip"),
        (b"x", 1, {"content-encoding": "br"}, "encoding 'br'; identity was asked for"),
        (b"x", 1, {"content-encoding": "gzip, gzip"}, "encoding 'gzip, gzip'"),
    ],
)
async def test_more_is_refused_by_name_and_costs_no_memory(
    body: bytes, times: int, headers: Mapping[str, str], complaint: str
) -> None:
    with answering(body, times=times, headers=headers) as url:
        tracemalloc.start()
        with pytest.raises(AnswerRefused, match=complaint):
            await posted(url)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BOMB / 8

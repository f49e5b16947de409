"""One contract for every index of the search service: BM25 and a dense one answer alike."""

import asyncio
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from astraflow.errors import RecipeError
from astraflow_environment.adapters.dense_index import DenseIndex, embedder
from astraflow_environment.adapters.search import MAX_QUERY_CHARS
from astraflow_environment.adapters.search_service import (
    MAX_BODY_BYTES,
    PassageIndex,
    SearchIndex,
    search_app,
)
from astraflow_kit.http import HttpServer

PASSAGES = [
    {"doc_id": "d1", "title": "Tall ships", "text": "A barque has three masts."},
    {"doc_id": "d2", "title": "Harbours", "text": "Oslo has a harbour, and Bergen another."},
    {"doc_id": "d3", "title": "Bread", "text": "Rye and water."},
]


def words(texts: Sequence[str]) -> NDArray[np.float64]:
    """Each text as how often it has each word, in 1,024 places."""
    found = np.zeros((len(texts), 1024))
    for row, text in enumerate(texts):
        for word in text.lower().replace(",", " ").replace(".", " ").split():
            found[row, crc32(word.encode()) % 1024] += 1
    return found


@pytest.fixture(params=["bm25", "dense"])
def service(request: pytest.FixtureRequest) -> TestClient:
    index: SearchIndex = (
        PassageIndex(PASSAGES) if request.param == "bm25" else DenseIndex(PASSAGES, embed=words)
    )
    return TestClient(search_app(index))


def found(service: TestClient, **asked: object) -> list[str]:
    answer = service.post("/search", json=asked)
    assert answer.status_code == 200
    passages: list[dict[str, Any]] = answer.json()["passages"]
    assert all(passage in PASSAGES for passage in passages)
    return [passage["doc_id"] for passage in passages]


def test_the_best_passage_comes_first_whole_and_at_most_as_many_as_asked_for(service: TestClient) -> None:
    assert found(service, query="harbour in Oslo", top_k=1) == ["d2"]
    assert found(service, query="rye bread", top_k=3)[0] == "d3"
    assert found(service, query="barque bergen", top_k=2) in (["d1", "d2"], ["d2", "d1"])
    assert len(found(service, query="barque bergen rye", top_k=100)) == 3


def test_what_nothing_has_in_common_finds_nothing(service: TestClient) -> None:
    assert found(service, query="zebra") == []
    assert found(service, query="") == []


@pytest.mark.parametrize(
    "asked", [{}, {"query": "x", "top_k": 0}, {"query": "x", "top_k": 101}, {"query": 3}]
)
def test_a_malformed_search_is_refused(service: TestClient, asked: dict[str, object]) -> None:
    assert service.post("/search", json=asked).status_code == 422


def test_the_longest_query_is_read_in_any_spelling_and_a_longer_body_is_not(service: TestClient) -> None:
    longest = json.dumps({"query": "\N{GRINNING FACE}" * MAX_QUERY_CHARS})
    assert len(longest) > 12 * MAX_QUERY_CHARS
    assert service.post("/search", content=longest).status_code == 200
    refused = service.post("/search", content=longest.ljust(MAX_BODY_BYTES + 1))
    assert (refused.status_code, refused.json()) == (413, {"detail": "the body has more than 131072 bytes"})


async def flood(host: str, port: int) -> None:
    """Send a body of 60 MiB, or as much of it as the service takes."""
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /search HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (960 * 2**16))
    with suppress(ConnectionError):
        for _ in range(960):
            writer.write(b'"' * 2**16)
            await writer.drain()
    writer.close()


async def test_bodies_without_an_end_that_come_at_once_cost_no_memory() -> None:
    server = HttpServer(search_app(DenseIndex(PASSAGES, embed=words)))
    await server.start()
    serving = asyncio.create_task(server.run())
    host, _, port = server.address.partition(":")
    await flood(host, int(port))  # what a first request imports is not counted
    tracemalloc.start()
    await asyncio.gather(*(flood(host, int(port)) for _ in range(8)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    await server.stop(deadline_s=1)
    await serving
    assert peak < 8 * 2**20


def test_the_service_says_that_it_works(service: TestClient) -> None:
    assert service.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize("made", [[1.0, 2.0], [[1.0]], [[float("nan")], [1.0], [1.0]]])
def test_an_embedder_that_makes_no_row_a_text_is_refused(made: list[Any]) -> None:
    with pytest.raises(RecipeError, match=r"the embedder made .* of 3 texts; it must return finite numbers"):
        DenseIndex(PASSAGES, embed=lambda _: made)


def test_an_embedder_is_named_as_module_and_function() -> None:
    assert embedder(f"{__name__}:words") is words
    for name in ("words", f"{__name__}:sentences", "no_such_module:words"):
        with pytest.raises(RecipeError, match=rf"--embed '{name}': .* as module:function"):
            embedder(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "passages.jsonl:2: no 'title'"),
        (("--embed", "nothing"), "passages.jsonl:2: no 'title'"),
        (("--embed", "a:b", "--sentence-transformers", "m"), "not allowed with argument --embed"),
    ],
)
def test_what_is_wrong_with_the_options_or_a_passage_is_said(
    options: Sequence[str], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (PASSAGES[0], {"doc_id": "d2"})))
    command = [sys.executable, "-m", "astraflow_environment.adapters.search_service", "--passages", str(file)]
    finished = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, said in finished.stderr) == (2, True), finished.stderr

"""One contract for every index of the search service: BM25 and a dense one answer alike."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from astraflow.errors import RecipeError
from astraflow_environment.adapters.dense_index import DenseIndex, embedder
from astraflow_environment.adapters.search_service import PassageIndex, SearchIndex, search_app

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

"""A search service over a file of passages, over HTTP: BM25 in memory, or a dense index.

Invariant: a request is read to `MAX_BODY_BYTES` and no further, however many come at once.
Contract: POST /search takes `{"query": TEXT, "top_k": N}` and answers `{"passages": [{"doc_id", "title", "text"}, …]}`,
the best first, fewer where fewer have anything of the query.
Started as `python -m astraflow_environment.adapters.search_service --passages FILE`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from astraflow.data.task_files import read_rows
from astraflow.errors import RecipeError
from astraflow_environment.adapters.dense_index import DenseIndex, embedder, sentence_transformer
from astraflow_environment.adapters.search import MAX_QUERY_CHARS
from astraflow_kit import lifecycle
from astraflow_kit.http import HttpServer, body_of
from astraflow_kit.log import get_logger

log = get_logger(__name__)

MAX_BODY_BYTES = 2**17
"""Room for the longest query in any spelling: JSON may take twelve bytes for a character."""
_FIELDS = {"doc_id": str, "title": str, "text": str}


class SearchRequest(BaseModel):
    """One search."""

    query: Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
    top_k: Annotated[int, Field(ge=1, le=100)] = 5


class SearchIndex(Protocol):
    """What the service searches in."""

    def search(self, query: str, *, top_k: int) -> list[Mapping[str, str]]:
        """Return at most `top_k` passages, the best first; none that has nothing of the query."""


class PassageIndex:
    """Passages by BM25 of title and text, English words stemmed. Raises ModuleNotFoundError without bm25s."""

    def __init__(self, passages: Sequence[Mapping[str, str]]) -> None:
        import bm25s
        import Stemmer

        self._passages = passages
        self._stemmer = Stemmer.Stemmer("english")
        self._index = bm25s.BM25()
        texts = [f"{passage['title']} {passage['text']}" for passage in passages]
        self._index.index(
            bm25s.tokenize(texts, stemmer=self._stemmer, show_progress=False), show_progress=False
        )

    def search(self, query: str, *, top_k: int) -> list[Mapping[str, str]]:
        """Return the best passages that share a word with the query."""
        import bm25s

        words = bm25s.tokenize(query, stemmer=self._stemmer, return_ids=False, show_progress=False)
        known = [[word for word in words[0] if word in self._index.vocab_dict]]
        if not known[0]:
            return []
        found, scores = self._index.retrieve(
            known, k=min(top_k, len(self._passages)), show_progress=False, return_as="tuple"
        )
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [self._passages[number] for number, score in pairs if score > 0]


def search_app(index: SearchIndex) -> FastAPI:
    """The service over an index."""
    app = FastAPI()

    @app.post("/search")
    async def search(request: Request) -> Response:
        body = await body_of(request, max_bytes=MAX_BODY_BYTES)
        if body is None:
            return JSONResponse({"detail": f"the body has more than {MAX_BODY_BYTES} bytes"}, 413)
        try:
            asked = SearchRequest.model_validate_json(body)
        except ValidationError as error:
            return JSONResponse({"detail": error.errors(include_input=False, include_context=False)}, 422)
        return JSONResponse(
            {"passages": await run_in_threadpool(index.search, asked.query, top_k=asked.top_k)}
        )

    @app.get("/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def main() -> None:
    """Read the passages, index them, serve until told to stop."""
    parser = argparse.ArgumentParser(description="Serve searches over passages.")
    parser.add_argument(
        "--passages", type=Path, required=True, help="JSON lines of doc_id, title and text; .gz or not"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7200)
    dense = parser.add_mutually_exclusive_group()
    dense.add_argument(
        "--embed", metavar="MODULE:FUNCTION", help="dense: takes texts, returns a row for each"
    )
    dense.add_argument("--sentence-transformers", metavar="MODEL", help="dense: name or folder of a model")
    options = parser.parse_args()
    try:
        index = _index(options)
    except ModuleNotFoundError as error:
        extra = "search-dense" if options.sentence_transformers else "search"
        parser.error(f"{error.name} is missing; pip install 'astraflow[environment,{extra}]'")
    except RecipeError as error:
        parser.error(error.message)
    server = HttpServer(search_app(index), host=options.host, port=options.port, setting="--port")
    sys.exit(lifecycle.run(partial(_serve, server)))


async def _serve(server: HttpServer, life: lifecycle.Lifecycle) -> None:
    def say() -> None:
        log.info("search.started", url=f"http://{server.address}/search")

    await lifecycle.run_services([server], lifecycle=life, on_started=say)


def _index(options: argparse.Namespace) -> SearchIndex:
    remedy = "--passages names a file with JSON lines"
    passages = read_rows(options.passages, fields=_FIELDS, remedy=remedy)
    if options.sentence_transformers:
        return DenseIndex(passages, embed=sentence_transformer(options.sentence_transformers))
    return DenseIndex(passages, embed=embedder(options.embed)) if options.embed else PassageIndex(passages)


if __name__ == "__main__":
    main()

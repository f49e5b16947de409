"""A search service over a file of passages, over HTTP: BM25 in memory, or a dense index.

Contract: POST /search takes `{"query": TEXT, "top_k": N}` and answers `{"passages": [{"doc_id", "title", "text"}, …]}`,
the best first, fewer where fewer have anything of the query.
Started as `python -m astraflow_environment.adapters.search_service --passages FILE`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from astraflow.data.task_files import read_rows
from astraflow.errors import RecipeError
from astraflow_environment.adapters.dense_index import DenseIndex, embedder, sentence_transformer
from astraflow_environment.adapters.search import MAX_QUERY_CHARS
from astraflow_kit.http import TimedProtocol

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
    def search(request: SearchRequest) -> dict[str, list[Mapping[str, str]]]:
        return {"passages": index.search(request.query, top_k=request.top_k)}

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
    uvicorn.run(search_app(index), host=options.host, port=options.port, http=TimedProtocol)


def _index(options: argparse.Namespace) -> SearchIndex:
    remedy = "--passages names a file with JSON lines"
    passages = read_rows(options.passages, fields=_FIELDS, remedy=remedy)
    if options.sentence_transformers:
        return DenseIndex(passages, embed=sentence_transformer(options.sentence_transformers))
    return DenseIndex(passages, embed=embedder(options.embed)) if options.embed else PassageIndex(passages)


if __name__ == "__main__":
    main()

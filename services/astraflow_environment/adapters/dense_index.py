"""A dense index over passages: the nearest embeddings, all of them compared with the query's.

Invariant: the contract of `search_service.SearchIndex`, whatever makes the embeddings. Made by `search_service` for
`--embed` or `--sentence-transformers`. Exact, and right for as many passages as one matrix holds (a million of 384
numbers are 1.5 GB); beyond that put an approximate index behind the same contract.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from astraflow.errors import RecipeError

Embed = Callable[[Sequence[str]], ArrayLike]
"""Takes texts and returns float[texts, dimensions]; the same dimensions at every call."""

_BATCH = 256
"""Passages that are embedded at once."""


class DenseIndex:
    """Passages by the cosine of their embedding, of title and text, with the query's."""

    def __init__(self, passages: Sequence[Mapping[str, str]], *, embed: Embed) -> None:
        self._passages, self._embed = passages, embed
        texts = [f"{passage['title']} {passage['text']}" for passage in passages]
        batches = [self._unit(texts[first : first + _BATCH]) for first in range(0, len(texts), _BATCH)]
        self._passages_PD = np.concatenate(batches)

    def search(self, query: str, *, top_k: int) -> list[Mapping[str, str]]:
        """Return the nearest passages; none that has nothing in common with the query."""
        cosine_P = self._passages_PD @ self._unit([query])[0]
        nearest = np.argsort(-cosine_P, kind="stable")[:top_k].tolist()
        return [self._passages[number] for number in nearest if cosine_P[number] > 0]

    def _unit(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings of length 1; one of length 0 stays as it is."""
        found = np.asarray(self._embed(texts), dtype=np.float32)
        if found.ndim != 2 or len(found) != len(texts) or not np.isfinite(found).all():
            raise RecipeError(
                f"the embedder made {found.shape} of {len(texts)} texts; it must return finite numbers, a row a text"
            )
        unit: NDArray[np.float32] = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return unit


def embedder(name: str) -> Embed:
    """What `module:function` names. Raises RecipeError."""
    module, _, function = name.partition(":")
    try:
        found: Embed = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"--embed {name!r}: {error}; name a function of texts that returns a row of numbers for each, as "
            "module:function"
        ) from error
    return found


def sentence_transformer(model: str) -> Embed:
    """The embedder of a model's name or folder. Raises ModuleNotFoundError without the package."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model)
    return lambda texts: loaded.encode(list(texts), show_progress_bar=False)

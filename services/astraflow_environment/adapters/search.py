"""Questions over passages that a search service holds: the assistant searches as often as it wants, then answers.

Invariant: a search that cannot be made never looks like one that found nothing: without the service the episode goes to
another node. Named by a recipe, or served, as `astraflow_environment.adapters.search:Search`; any service with the
contract of `search_service` will do.
"""

import re
from collections.abc import Collection

from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec
from astraflow_kit.http_answers import post_json

_SEARCH = re.compile(r"<search>(.*?)</search>", re.S)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
MAX_QUERY_CHARS = 10_000
"""Of the contract; what a policy writes beyond it is left out."""
_MAX_ANSWER_BYTES = 16 * 2**20
_HINT = "Write <search>what to look for</search>, or <answer>the answer</answer>."


class Search:
    """`<search>QUERY</search>` shows the `top_k` best passages, `<answer>…</answer>` ends the episode.

    Of an answer the last tag counts. Metrics: `searches`, and `recall`, the share of the task's `support` (a list of
    `doc_id`s) that was found.
    """

    def __init__(self, *, url: str, top_k: int = 5, max_chars: int = 1200, timeout_s: float = 10.0) -> None:
        """`url` takes a search by POST; a passage is cut after `max_chars`."""
        self._url, self._top_k, self._max_chars, self._timeout_s = url, top_k, max_chars, timeout_s
        self._support: Collection[str] = ()
        self._found: set[str] = set()
        self._searches = 0

    async def reset(self, task: TaskSpec) -> Observation:
        """Show nothing: the task's own messages ask."""
        self._support = frozenset(task.data.get("support", ()))
        return Observation()

    async def step(self, action: Message) -> Observation:
        """Search or end. Raises MissingCapability where no search service answers."""
        tags = sorted([*_SEARCH.finditer(action.content), *_ANSWER.finditer(action.content)], key=_place)
        if tags and tags[-1].re is _ANSWER:
            return Observation(done=True, metrics=self._metrics())
        shown = await self._search(tags[-1][1].strip()[:MAX_QUERY_CHARS]) if tags else _HINT
        return Observation(messages=(Message("user", shown),), metrics=self._metrics())

    async def close(self) -> None:
        """Nothing is held."""

    async def _search(self, query: str) -> str:
        import httpx

        self._searches += 1
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s) as client:
                asked = {"query": query, "top_k": self._top_k}
                answer = await post_json(client, self._url, asked, max_bytes=_MAX_ANSWER_BYTES)
        except httpx.ConnectError as error:
            raise MissingCapability(
                f"no search service at {self._url}; start it: python -P -m "
                "astraflow_environment.adapters.search_service --passages FILE"
            ) from error
        passages = answer.raise_for_status().json()["passages"]
        self._found |= {passage["doc_id"] for passage in passages}
        lines = (f"{each['title']}: {each['text'][: self._max_chars]}" for each in passages)
        return "\n".join(lines) or "Nothing was found."

    def _metrics(self) -> dict[str, float]:
        recall = len(self._found & set(self._support)) / len(self._support) if self._support else 0.0
        return {"searches": float(self._searches), "recall": recall}


def _place(match: re.Match[str]) -> int:
    return match.start()

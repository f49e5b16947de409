"""Samples as the page shows and exports them: with texts, where the policy's tokenizer is in the run's store.

The token texts come from the `tokenizer.json` that travels with each weight version, so no tokenizer library is needed.
Called by `site`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.errors import AstraflowError, InvalidArgumentError, PreconditionError
from astraflow.samples.content import sample_values
from astraflow.samples.parquet import parquet
from astraflow.samples.token_texts import TokenTexts
from astraflow_dataflow.dashboard.gateway import Gateway
from astraflow_dataflow.episodes.archiving import Archives
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_kit.log import get_logger
from astraflow_weights.store import open_store
from astraflow_weights.versions.log import VersionLog

log = get_logger(__name__)

_READ_AT_ONCE = 32
MAX_SEARCHED, MAX_EXPORTED = 500, 5000
"""Samples that one search reads, and that one export reads."""
_TOKENIZER = "tokenizer.json"


@dataclass
class Samples:
    """Reads samples of this server's runs for the caller of the page."""

    gateway: Gateway
    registry: RunRegistry
    archives: Archives
    _texts: dict[tuple[str, str], TokenTexts] = field(default_factory=dict)

    async def one(self, run_id: str, sample_id: str) -> dict[str, Any]:
        """Return a sample with its tokens; `no_texts` says why they have no texts. Raises as GetSamples."""
        (content,) = await self._contents(run_id, [sample_id])
        texts, missing = await self._texts_of(run_id, content.sample.policy_id)
        return sample_values(content, texts) | {"no_texts": missing}

    async def search(self, request: pb.ListSamplesRequest, text: str) -> dict[str, Any]:
        """Return the samples of a page whose text has `text`, whatever its case; `searched` says how many were read,
        `no_texts` why the last of them has none.
        """
        found: list[dict[str, Any]] = []
        searched, missing = 0, ""
        while searched < MAX_SEARCHED and len(found) < (request.page_size or 50):
            page = await self._page(request)
            samples, why = await self._values(request.run_id, [sample.sample_id for sample in page.samples])
            searched += len(samples)
            missing = why if samples else missing
            found += [sample for sample in samples if _has(sample, text)]
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        listed = [{**sample, "excerpt": _excerpt(_text(sample), text)} for sample in found]
        for sample in listed:
            for name in ("token_ids", "texts", "loss_mask", "logprobs", "trainer_logprobs"):
                del sample[name]
        return {
            "samples": listed,
            "next_page_token": request.page_token,
            "searched": searched,
            "no_texts": missing,
        }

    async def exported(
        self, request: pb.ListSamplesRequest, kind: str, *, text: str = ""
    ) -> tuple[AsyncIterator[bytes], str]:
        """Return a file of the first MAX_EXPORTED samples, those of them whose text has `text`, and its media type.
        Raises InvalidArgumentError for another kind than `jsonl` and `parquet`, and as ListSamples.
        """
        first = await self._page(request)  # what is refused is refused before the file begins
        if kind == "jsonl":
            return self._lines(self._all(request, first, text)), "application/jsonl"
        if kind == "parquet":
            return self._table(self._all(request, first, text)), "application/vnd.apache.parquet"
        raise InvalidArgumentError(f"format {kind!r}: give jsonl or parquet")

    @staticmethod
    async def _lines(samples: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for sample in samples:
            yield json.dumps(sample, ensure_ascii=False).encode() + b"\n"

    @staticmethod
    async def _table(samples: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        yield await asyncio.to_thread(parquet, [sample async for sample in samples])

    async def _all(
        self, request: pb.ListSamplesRequest, page: pb.ListSamplesResponse, text: str
    ) -> AsyncIterator[dict[str, Any]]:
        left = MAX_EXPORTED
        while True:
            wanted = [sample.sample_id for sample in page.samples][:left]
            samples, _ = await self._values(request.run_id, wanted)
            for sample in samples:
                left -= 1
                if _has(sample, text):
                    yield sample
            if not page.next_page_token or left <= 0:
                return
            request.page_token = page.next_page_token
            page = await self._page(request)

    async def _page(self, request: pb.ListSamplesRequest) -> pb.ListSamplesResponse:
        return cast("pb.ListSamplesResponse", await self.gateway.ask("SampleService", "ListSamples", request))

    async def _contents(self, run_id: str, sample_ids: Sequence[str]) -> list[pb.SampleContent]:
        found: list[pb.SampleContent] = []
        while left := sample_ids[len(found) : len(found) + _READ_AT_ONCE]:
            request = pb.GetSamplesRequest(run_id=run_id, sample_ids=left)
            answer = await self.gateway.ask("SampleService", "GetSamples", request)
            found += cast("pb.GetSamplesResponse", answer).samples
        return found

    async def _values(self, run_id: str, sample_ids: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        """The samples, and why the last of them has no texts; a policy's are looked for once."""
        contents = await self._contents(run_id, sample_ids)
        policies = {each.sample.policy_id for each in contents}
        texts = {policy_id: await self._texts_of(run_id, policy_id) for policy_id in policies}
        values = [sample_values(each, texts[each.sample.policy_id][0]) for each in contents]
        return values, texts[contents[-1].sample.policy_id][1] if contents else ""

    async def _texts_of(self, run_id: str, policy_id: str) -> tuple[TokenTexts | None, str]:
        """The policy's token texts, or why there are none."""
        run = await self.registry.get(run_id)
        key = (run.run_id, policy_id)
        if key not in self._texts:
            try:
                self._texts[key] = await self.archives.in_thread(lambda: self._stored_texts(run, policy_id))
            except (AstraflowError, OSError, ValueError) as error:
                log.info("samples.no_texts", run_id=run.run_id, policy_id=policy_id, why=str(error))
                return None, f"token ids are shown, for the tokenizer cannot be read: {error}"
        return self._texts[key], ""

    def _stored_texts(self, run: RunContext, policy_id: str) -> TokenTexts:
        known = self.archives.work_dir / f"texts-{run.run_id}"
        self.archives.work_dir.mkdir(parents=True, exist_ok=True)
        store = open_store(run.run.store_uri, settings=self.archives.settings, known=known)
        versions = VersionLog(store, run_id=run.run_id, policy_id=policy_id)
        newest = versions.refresh()
        if newest is None:
            raise PreconditionError(f"policy {policy_id!r} has no version in the store")
        for asset in versions.manifest(newest).assets:
            if asset.file_name == _TOKENIZER:
                return TokenTexts.parse(store.get(asset.blob.key))
        raise PreconditionError(f"version {newest} of policy {policy_id!r} has no {_TOKENIZER}")


def _text(sample: dict[str, Any]) -> str:
    return "".join(sample["texts"] or ())


def _has(sample: dict[str, Any], text: str) -> bool:
    return text.casefold() in _text(sample).casefold()


def _excerpt(text: str, wanted: str) -> str:
    place = max(0, text.casefold().find(wanted.casefold()) - 60)
    return text[place : place + 160]

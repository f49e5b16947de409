"""The archive of one run: rows are added in packs, listed by what they are, and read with their tokens.

Invariant: a pack that is added twice is there once; what a page or an answer costs is bounded. Blocking: call it in a
thread. Made by the dataflow server, whose archiving task writes and whose `SampleService` reads.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.dataflow.v1.sample_service_pb2 import (
    GetSamplesResponse,
    ListSamplesRequest,
    ListSamplesResponse,
    SampleContent,
)
from astraflow.errors import NotFoundError
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow_archive import layout
from astraflow_archive.columns import SUMMARY, Row, samples_in, table_of, trajectory_in
from astraflow_archive.layout import Place
from astraflow_archive.parquet_files import ParquetObject, encoded
from astraflow_archive.trainer_logprobs import TrainerLogprobs
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.store import ObjectStore

MAX_FILES_PER_PAGE = 32
MAX_ANSWER_BYTES = 32 * 2**20
"""Of one answer with tokens; at least one sample is in it."""
_DAY_MS = 86_400_000


class Archive:
    """Samples of one run in its store."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store, self._run_id = store, run_id

    def add(self, rows: Sequence[Row], *, span: str) -> int:
        """Write rows, a file for each policy and step; `span` names the pack that they are. Returns the bytes.

        The same pack again changes nothing.
        """
        written = 0
        parts: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in rows:
            parts[row.sample.policy_id, row.sample.step].append(row)
        for (policy_id, step), part in sorted(parts.items()):
            held = "\n".join(f"{row.sample.item.trajectory_id} {row.sample.episode_id}" for row in part)
            name = f"{span}_{hashlib.sha256(held.encode()).hexdigest()[:16]}"
            place = Place(run_id=self._run_id, policy_id=policy_id, step=step, name=name)
            content = encoded(table_of(part))
            self._store.put_if_absent(place.key, content)
            written += len(content)
        return written

    def page(self, request: ListSamplesRequest, *, size: int) -> ListSamplesResponse:
        """Return the next samples that `request` asks for, by policy, step and time; at most `size`.

        A page may hold fewer, or none, and still have a next one: only so many files are read for it.
        """
        answer = ListSamplesResponse()
        for number, (place, first) in enumerate(self._files(request)):
            if number == MAX_FILES_PER_PAGE:
                return answer
            rows = 0
            for rows, sample in enumerate(self._samples(place), start=1):
                if rows > first and matches(sample, request):
                    answer.samples.append(sample)
                if len(answer.samples) == size:
                    answer.next_page_token = sample.sample_id
                    return answer
            answer.next_page_token = place.sample_id(rows)
        answer.next_page_token = ""
        return answer

    def contents(self, sample_ids: Sequence[str]) -> GetSamplesResponse:
        """Return samples with their tokens, in the order asked, until MAX_ANSWER_BYTES are full.

        Raises NotFoundError for one that is not there (any more), InvalidArgumentError for what is no id.
        """
        answer, logprobs = GetSamplesResponse(), TrainerLogprobs(self._store, self._run_id)
        for sample_id in sample_ids:
            content = self._content(*layout.located(self._run_id, sample_id))
            content.trainer_logprobs = logprobs.of(content.sample)
            if answer.samples and answer.ByteSize() + content.ByteSize() > MAX_ANSWER_BYTES:
                break
            answer.samples.append(content)
        return answer

    def collect(self, settings: ArchiveSettings, *, now_ms: int) -> int:
        """Delete what is older, or more, than the settings keep, oldest first. Returns the files deleted.

        What trainers wrote beside the samples of a step goes with the last of these.
        """
        listed = [(Place.at(info.key), info) for info in self._store.list(layout.root(self._run_id))]
        files = sorted((place.ms, info.size_bytes, info.key, place.beside) for place, info in listed if place)
        beside = defaultdict(list)
        for place, info in listed:
            if place is None:
                beside[f"{info.key.rpartition('/')[0]}/"].append(info)
        left = Counter(folder for *_, folder in files)
        held = sum(size for _, size, *_ in files)
        held += sum(info.size_bytes for folder in left for info in beside[folder])
        oldest = 0 if settings.keep_days is None else now_ms - settings.keep_days * _DAY_MS
        most = held if settings.keep_gib is None else settings.keep_gib * 2**30
        deleted = 0
        for ms, size, key, folder in files:
            if ms >= oldest and held <= most:
                break
            left[folder] -= 1
            for info in beside[folder] if left[folder] == 0 else ():
                self._store.delete(info.key)
                held, deleted = held - info.size_bytes, deleted + 1
            self._store.delete(key)
            held, deleted = held - size, deleted + 1
        return deleted

    def delete(self) -> int:
        """Delete the whole archive of the run. Returns the files deleted."""
        keys = [info.key for info in self._store.list(layout.root(self._run_id))]
        for key in keys:
            self._store.delete(key)
        return len(keys)

    def _files(self, request: ListSamplesRequest) -> Iterator[tuple[Place, int]]:
        """Files that may hold what is asked for, each with the rows that earlier pages had."""
        after = ""
        folder = layout.prefix(self._run_id, policy_id=request.policy_id)
        if request.page_token:
            place, row = layout.located(self._run_id, request.page_token)
            after = place.key
            yield place, row + 1
        elif request.policy_id and request.min_step:
            after = layout.prefix(self._run_id, policy_id=request.policy_id, step=request.min_step)
        for info in self._store.list(folder, after=after):
            found = Place.at(info.key)
            if found and request.min_step <= found.step <= (request.max_step or found.step):
                yield found, 0

    def _samples(self, place: Place) -> Iterator[Sample]:
        try:
            table = ParquetObject(self._store, place.key).table(SUMMARY.names)
        except ObjectNotFound:
            return  # collected since it was listed
        yield from samples_in(table, place)

    def _content(self, place: Place, row: int) -> SampleContent:
        gone = f"the archive has no sample {place.sample_id(row)!r} (any more); list them again"
        try:
            file = ParquetObject(self._store, place.key)
        except ObjectNotFound as error:
            raise NotFoundError(gone) from error
        if row >= file.num_rows:
            raise NotFoundError(gone)
        table, position = file.group_of(row)
        (sample,) = samples_in(table.slice(position, 1), place, first_row=row)
        return SampleContent(sample=sample, trajectory=trajectory_in(table, position))


def matches(sample: Sample, request: ListSamplesRequest) -> bool:
    """Whether a sample is one that was asked for; policy and step are judged by its file."""
    item = sample.item
    return (
        (not request.reasons or sample.reason in request.reasons)
        and request.source in ("", item.source)
        and request.task_id in ("", item.task_id)
        and request.role in ("", item.role or sample.policy_id)
        and (not request.HasField("min_reward") or item.reward >= request.min_reward)
        and (not request.HasField("max_reward") or item.reward <= request.max_reward)
        and (not request.HasField("min_tokens") or item.num_tokens >= request.min_tokens)
        and (not request.HasField("max_tokens") or item.num_tokens <= request.max_tokens)
        and (not request.HasField("version") or item.min_version <= request.version <= item.max_version)
    )

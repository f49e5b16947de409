"""Archiving: trajectories whose part in a run is over are written to the run's store, off everybody's path.

A pack is sealed in Redis, written under names that follow from what it holds, and then forgotten, so a crash anywhere
in between repeats the same writes. While the store fails nothing waits for it: Redis gives up the oldest beyond the
recipe's bound and counts them. One task per run and process, started by `server`; of several servers one writes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.errors import AstraflowError, NotFoundError, PreconditionError
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow_dataflow.records import ArchiveEntry
from astraflow_dataflow.runs.registry import RunContext, require_installed
from astraflow_dataflow.store.episodes.archive import ArchiveStore
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import open_store

if TYPE_CHECKING:
    from astraflow_archive.archive import Archive

log = get_logger(__name__)

T = TypeVar("T")

PACK_BYTES = 16 * 2**20
"""Payloads that are written together as soon as they are there."""
_POLL_S = 2.0
_THREADS = 4
_LEASE_S = 15.0
"""A server that dies while it writes holds up its pack this long; one that takes longer writes what another writes too,
and a pack that is added twice is there once."""
_COLLECT_EVERY_S = 600.0


@dataclass
class Archives:
    """The archives of this server's runs."""

    settings: StoreSettings
    work_dir: Path
    threads: ThreadPoolExecutor
    """What waits for stores; a store that hangs holds up nothing else."""
    _opened: dict[str, Archive] = field(default_factory=dict)

    @classmethod
    def over(cls, settings: StoreSettings, *, work_dir: Path) -> Archives:
        """Archives in stores that `settings` reach; in `work_dir` is remembered which folders were seen."""
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="archive")
        return cls(settings=settings, work_dir=work_dir, threads=threads)

    async def of(self, context: RunContext) -> Archive:
        """The archive of a run. Raises PreconditionError when its recipe has none, or pyarrow is not installed."""
        if context.recipe.dataflow.archive is None:
            raise PreconditionError(
                f"run {context.run_id} keeps no archive; a recipe with `dataflow: {{archive: {{}}}}` does"
            )
        require_installed(context.recipe.dataflow.archive)
        if context.run_id not in self._opened:
            run = context.run
            self._opened[context.run_id] = await self.in_thread(lambda: self._open(run.store_uri, run.run_id))
        return self._opened[context.run_id]

    async def delete(self, context: RunContext) -> None:
        """Delete the archive of a run that was deleted, if its recipe says so; a store that fails keeps it."""
        archive = context.recipe.dataflow.archive
        if archive is not None and archive.delete_with_run:
            try:
                deleted = await self.in_thread((await self.of(context)).delete)
                log.info("archive.deleted", run_id=context.run_id, files=deleted)
            except AstraflowError as error:
                log.warning("archive.not_deleted", run_id=context.run_id, message=error.message)
        self._opened.pop(context.run_id, None)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what blocks in a thread of the archives."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _open(self, store_uri: str, run_id: str) -> Archive:
        from astraflow_archive.archive import Archive  # pyarrow is slow to import, and an extra

        self.work_dir.mkdir(parents=True, exist_ok=True)
        known = self.work_dir / f"store-{hashlib.sha256(store_uri.encode()).hexdigest()[:16]}"
        return Archive(open_store(store_uri, settings=self.settings, known=known), run_id)


@dataclass
class Archiving:
    """Writes the archive of one run, whose recipe has one."""

    context: RunContext
    store: ArchiveStore
    archives: Archives
    metrics: Metrics
    server: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names this task among those of the same Redis."""
    _fails: str = ""
    _collected_s: float = -math.inf

    @property
    def settings(self) -> ArchiveSettings:
        """What the recipe says."""
        settings = self.context.recipe.dataflow.archive
        assert settings is not None, "made for runs that have one"
        return settings

    async def run(self) -> None:
        """Write until the run is deleted or the task is cancelled."""
        while True:
            try:
                if await self.write_pack():
                    continue
                await self.collect()
            except AstraflowError as error:
                if isinstance(error, NotFoundError) and not isinstance(error, ObjectNotFound):
                    return  # the run is gone
                await self._note(error)
            await asyncio.sleep(min(_POLL_S, self.settings.write_every_s))

    async def write_pack(self) -> bool:
        """Write the next pack, if one is due. Returns whether there was one."""
        run_id = self.context.run_id
        entries = await self.store.pack(
            run_id,
            server=self.server,
            lease_s=_LEASE_S,
            least_age_s=self.settings.write_every_s,
            pack_bytes=PACK_BYTES,
        )
        if not entries:
            return False
        failpoints.hit("dataflow.archive_sealed")
        archive = await self.archives.of(self.context)
        bodies = [await self.store.bodies(run_id, entry) for entry in entries]
        num_bytes = await self.archives.in_thread(lambda: _add(archive, entries, bodies))
        failpoints.hit("dataflow.archive_stored")
        count = await self.store.written(run_id, entries, num_bytes=num_bytes)
        self.metrics.increment("astraflow_dataflow_archived_total", count)
        self._fails = ""
        log.info("archive.written", run_id=run_id, trajectories=count, bytes=num_bytes)
        return True

    async def collect(self) -> None:
        """Delete files that the recipe does not keep any longer, if that is due."""
        settings, now_s = self.settings, time.monotonic()
        if settings.keep_days is None and settings.keep_gib is None:
            return
        if now_s < self._collected_s + _COLLECT_EVERY_S:
            return
        self._collected_s = now_s
        archive, now_ms = await self.archives.of(self.context), int(time.time() * 1000)
        deleted = await self.archives.in_thread(lambda: archive.collect(settings, now_ms=now_ms))
        if deleted:
            log.info("archive.collected", run_id=self.context.run_id, files=deleted)

    async def _note(self, error: AstraflowError) -> None:
        """Say once what is wrong, here and to `why`; when that fails, too, Redis is away and says so itself."""
        if error.message != self._fails:
            self._fails = error.message
            log.warning(
                "archive.failed", run_id=self.context.run_id, reason=error.reason, message=error.message
            )
        try:
            await self.store.failed(self.context.run_id, error.message)
        except AstraflowError as lost:
            log.debug("archive.failure_not_noted", run_id=self.context.run_id, message=lost.message)


def _add(archive: Archive, entries: Sequence[ArchiveEntry], bodies: Sequence[Sequence[bytes | None]]) -> int:
    from astraflow_archive.columns import Row

    rows = [
        Row(sample, body)
        for entry, held in zip(entries, bodies, strict=True)
        for sample, body in zip(_samples(entry), held, strict=True)
        if body is not None
    ]
    return archive.add(rows, span=f"{entries[0].entry_id}_{entries[-1].entry_id}") if rows else 0


def _samples(entry: ArchiveEntry) -> list[Sample]:
    samples = []
    for item, place in zip(entry.items, entry.places, strict=True):
        sample = Sample(
            policy_id=entry.policy_id,
            step=entry.step,
            reason=entry.reason,
            batch_id=entry.batch_id,
            item=item,
            episode_id=place.partition(" ")[0],
        )
        sample.end_time.FromMilliseconds(int(entry.entry_id.partition("-")[0]))
        samples.append(sample)
    return samples

"""An engine as a process, driven by the node's own client: its rate, what a swap of weights stops, and what it loses.

Invariant: the load never pauses for a measurement; every sequence of it is counted token by token, so what a swap takes
away is seen. Called once per engine and model by `measure_served`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median

import numpy as np

from astraflow.dataflow.v1 import version_pb2
from astraflow_bench.figures import Figure, cpu_seconds
from astraflow_bench.rollout.models import Workload
from astraflow_raas.engine.base import GenerateCall, Generation
from astraflow_raas.engine.command import EngineCommand
from astraflow_raas.engine.process import EngineProcess, start_engine
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import whole
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog

_RUN, _POLICY = "bench", "solver"
_START_S = 300.0
_CHANGED_EVERY = 40
_GAP_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ServedFigures:
    """What one engine did with one model."""

    figures: Sequence[Figure]
    swap_s: float
    """Median time from stop to go on."""
    model_bytes: int


class _Versions:
    """A store with versions of a model, each a little different from the one before, and a node's mirror of it."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        folder.mkdir()
        store = FileStore(folder / "store")
        writer = VersionWriter.open(store, run_id=_RUN, policy_id=_POLICY, epoch=1)
        self._publisher = ShardPublisher(
            writer, uploads=writer.uploads, peers=OnePeer(), base=None, assets=[checkpoint / "config.json"]
        )
        self.model: dict[str, Array] = dict(map_model(checkpoint))
        self._mirror = folder / "mirror"
        log = VersionLog(store, run_id=_RUN, policy_id=_POLICY)
        self._source = MirrorSource(
            store, log_reader=log, mirror=None, open_mirror=lambda _bytes: Mirror(self._mirror)
        )
        self._step = 0

    def publish(self) -> version_pb2.Version:
        """Commit the next version."""
        # New arrays each time: the publisher compares with those that it was given before.
        self.model = {name: bits.copy() for name, bits in self.model.items()}
        for bits in self.model.values():
            bits.reshape(-1)[::_CHANGED_EVERY] ^= np.uint16(1)
        committed = self._publisher.publish(whole(self.model), step=self._step)
        self._step += 1
        return version_pb2.Version(
            policy_id=_POLICY,
            version=committed.version,
            sequence=committed.sequence,
            manifest_sha256=committed.manifest_sha256,
        )

    def fetch(self, version: version_pb2.Version) -> Path:
        """The folder of a version, verified, as a node gets it."""
        self._source.prefetch(version)
        return self._source.fetch(version)


@dataclass
class _Load:
    """Sequences side by side in one engine, and what became of them."""

    engine: EngineProcess
    workload: Workload
    places: int
    """At most as many as the engine has: a call that waits inside it over a swap is made again."""
    num_lost: int = 0
    num_tokens: int = 0
    num_across: int = 0
    num_repeated: int = 0
    stopping: bool = False
    _numbers: "count[int]" = field(default_factory=count)

    async def sample(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        """Sample calls in one request."""
        return await self.engine.engine.generate(calls)

    def call(self, *, num_tokens: int) -> GenerateCall:
        """A call of its own id, seed and prompt."""
        number = next(self._numbers)
        prompt = self.workload.prompts[number % len(self.workload.prompts)]
        return GenerateCall(
            rid=f"{number};",
            prompt_ids=prompt,
            max_new_tokens=num_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=number,
        )

    async def place(self) -> None:
        """Keep one place of the engine filled."""
        wanted = self.workload.num_new_tokens
        while not self.stopping:
            (answer,) = await self.sample([self.call(num_tokens=wanted)])
            if answer.finish_reason == "abort":
                self.num_repeated += 1
                continue
            self.num_tokens += len(answer.token_ids)
            self.num_lost += wanted - len(answer.token_ids)
            self.num_across += len(answer.spans) > 1
            assert all(one.end == other.start for one, other in pairwise(answer.spans)), answer.spans

    async def first_token_of(self, version: int) -> None:
        """Return when an answer was sampled by this version."""
        while True:
            (answer,) = await self.sample([self.call(num_tokens=1)])
            if answer.spans and answer.spans[-1].version == version:
                return


async def measure_served(
    name: str,
    command: EngineCommand,
    workload: Workload,
    *,
    checkpoint: Path,
    folder: Path,
    swaps: int,
    repeats: int,
) -> ServedFigures:
    """Start the engine, measure its rate without a swap, then swap under load."""
    versions = _Versions(folder, checkpoint)
    model_dir = await asyncio.to_thread(versions.fetch, versions.publish())
    async with _started(command, model_dir, folder=folder) as engine:
        load = _Load(engine, workload, places=command.max_running_requests - 1)
        rate = await _rate(load, repeats=repeats)
        pauses, delays = await _swaps(load, versions, swaps=swaps)
    model_bytes = sum(bits.nbytes for bits in versions.model.values())
    size = f"{model_bytes / 1e6:.0f} MB"
    row, ms = partial(Figure, subject=name), partial(Figure, subject=name, unit="ms")
    figures = [
        row(what=f"over HTTP, {size}", value=rate, unit="tokens/CPU-s"),
        ms(what=f"swap, {size}, median", value=1e3 * median(pauses)),
        ms(what=f"swap, {size}, longest", value=1e3 * max(pauses)),
        ms(what=f"manifest to first token, {size}, median", value=1e3 * median(delays)),
        row(what=f"sequences kept over a swap, {size}", value=load.num_across, unit="sequences"),
        row(what=f"calls made again, {size}", value=load.num_repeated, unit="calls"),
        Figure(
            what=f"tokens lost in {swaps} swaps, {size}",
            subject=name,
            value=load.num_lost,
            unit="tokens",
            most=0,
        ),
    ]
    return ServedFigures(figures=figures, swap_s=median(pauses), model_bytes=model_bytes)


@asynccontextmanager
async def _started(command: EngineCommand, model_dir: Path, *, folder: Path) -> AsyncIterator[EngineProcess]:
    process = await start_engine(command, model_dir=model_dir, version=0, log_path=folder / "engine.log")
    try:
        await process.wait_healthy(timeout_s=_START_S)
        await process.engine.introduce()
        await process.engine.served_version()
        yield process
    finally:
        await process.end()


async def _rate(load: _Load, *, repeats: int) -> float:
    """Tokens per CPU-second of everything that belongs to the engine, best of several runs of the workload."""
    best = 0.0
    for turn in range(repeats + 1):
        spent = cpu_seconds([load.engine.child.pid])
        waiting = [load.call(num_tokens=load.workload.num_new_tokens) for _ in load.workload.rows]
        requests = [waiting[at : at + load.places] for at in range(0, len(waiting), load.places)]
        answers = [await load.sample(calls) for calls in requests]
        spent = cpu_seconds([load.engine.child.pid]) - spent
        if turn:
            best = max(best, sum(len(answer.token_ids) for some in answers for answer in some) / spent)
    return best


async def _swaps(load: _Load, versions: _Versions, *, swaps: int) -> tuple[list[float], list[float]]:
    """Seconds of each swap, and from each commit until a token of its version was there."""
    pauses, delays = list[float](), list[float]()
    # One place is left for the call that waits for the first token.
    places = [asyncio.create_task(load.place()) for _ in range(load.places - 1)]
    for _ in range(swaps):
        await asyncio.sleep(_GAP_S)
        version = await asyncio.to_thread(versions.publish)
        committed_s = time.monotonic()
        model_dir = await asyncio.to_thread(versions.fetch, version)
        await load.engine.engine.swap(model_dir=model_dir, version=version.version)
        pauses.append(load.engine.engine.stopped_s)
        await load.first_token_of(version.version)
        delays.append(time.monotonic() - committed_s)
    load.stopping = True
    await asyncio.gather(*places)
    return pauses, delays

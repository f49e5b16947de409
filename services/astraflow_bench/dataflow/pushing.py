"""What a trajectory costs on its way in and out, and how long a batch takes, beside streams that do nothing else.

Invariant: our figures and the raw ones move the same bodies, in the same section, each after a warm-up, and pushes take
turns with them. A raw stream carries one trajectory a message, whatever ours packs. Called by `experiment`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from astraflow_bench.dataflow.driving import Driver
from astraflow_bench.dataflow.peers import measure_peers
from astraflow_bench.dataflow.processes import Bed, Spent, over_redis
from astraflow_bench.dataflow.published import PublishedBuffer
from astraflow_bench.dataflow.raw import RawCost, RawStreams, measure_redis, raw_streams
from astraflow_bench.dataflow.sizes import GROUP, PlaneSizes
from astraflow_bench.dataflow.workload import PROMPT_TOKENS, Episodes
from astraflow_bench.figures import Figure, medians

_TYPICAL = 2048
_MOST_SERVER_CPU = {"single": 1.8, "packed": 1.5}
_MOST_REDIS_CPU = {"single": 3.0, "packed": 1.5}
_MOST_COMMANDS = {"single": 12.0, "packed": 4.0}
_LEAST_PUSHED, _LEAST_FETCHED = 0.6, 0.8
_MOST_BATCH, _LEAST_OVER_PUBLISHED = 1.3, 40.0
_FORMS = ("single", "packed")
"""How episodes are pushed: each in a message of its own, or those of a task in one."""


@dataclass(frozen=True, kw_only=True)
class _Raw:
    """The same bodies moved by gRPC and by Redis alone."""

    pushed: RawCost
    fetched: RawCost
    stored: RawCost
    read: RawCost


async def measure_pushes(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """CPU, bytes a second and Redis commands of each length and form: medians over rounds in which all take turns."""
    figures: list[Figure] = []
    for tokens in sizes.tokens:
        count = _count(sizes, tokens)
        message = bytes(Episodes("raw", num_response=tokens).body_bytes)
        async with (
            over_redis(folder / f"{tokens}") as bed,
            raw_streams(folder, message, count=count) as streams,
        ):
            drivers = {
                form: await Driver.create(bed.client, f"bench-{form}", groups_per_step=sizes.batch_groups)
                for form in _FORMS
            }
            # Warm: fresh memory costs Redis page faults.
            await measure_redis(bed, message, count=count // 4 + 1)
            for form, driver in drivers.items():
                await _moved(bed, driver, form, tokens=tokens, num_batches=1)
            figures += medians(
                [await _round(bed, streams, drivers, tokens=tokens) for _ in range(sizes.rounds)]
            )
    return figures


async def measure_batch(sizes: PlaneSizes, folder: Path) -> list[Figure]:
    """Seconds until a trainer holds a batch of 2k-token trajectories; the best of several."""
    count = GROUP * sizes.batch_groups
    async with over_redis(folder / "bed") as bed:
        driver = await Driver.create(bed.client, groups_per_step=sizes.batch_groups)
        episodes = Episodes(driver.run_id, num_response=_TYPICAL)
        pushed_s, taken_s = [], []
        for step in range(max(2, sizes.batches)):
            leases = await driver.leased(sizes.batch_groups, prefix=f"{step}-")
            began_s = time.perf_counter()
            await driver.push(leases, episodes, packed=True)
            pushed_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            batch = await driver.acquire()
            await driver.fetch()
            taken_s.append(time.perf_counter() - began_s)
            await driver.finish(batch)
        message = bytes(episodes.body_bytes)
        async with raw_streams(folder, message, count=count) as streams:
            raw_s = [(await streams.measure())[1].seconds for _ in range(sizes.rounds)]
        _, read = await measure_redis(bed, message, count=count)
    published_s = _published_s(count)
    row = partial(Figure, what=f"batch of {count} × 2k", unit="ms")
    ratio = partial(Figure, subject="AstraFlow", unit="×")
    return [
        row(
            subject="AstraFlow",
            what=f"pushes of {count} × 2k, in groups of {GROUP}",
            value=1e3 * min(pushed_s),
        ),
        row(subject="AstraFlow", value=1e3 * min(taken_s)),
        *measure_peers(count=count, tokens=PROMPT_TOKENS + _TYPICAL),
        row(subject="raw gRPC stream", value=1e3 * min(raw_s)),
        row(subject="raw Redis GET", value=1e3 * read.seconds),
        row(subject="published buffer, in memory", value=1e3 * published_s),
        ratio(what="batch, over the raw stream", value=min(taken_s) / min(raw_s), most=_MOST_BATCH),
        ratio(
            what="batch, times as fast as the published buffer",
            value=published_s / min(taken_s),
            least=_LEAST_OVER_PUBLISHED,
        ),
    ]


def _count(sizes: PlaneSizes, tokens: int) -> int:
    """Trajectories of this length: whole batches, of about the same bytes from 2k tokens on."""
    share = (_TYPICAL + PROMPT_TOKENS) / max(_TYPICAL + PROMPT_TOKENS, tokens + PROMPT_TOKENS)
    return GROUP * sizes.batch_groups * max(1, round(sizes.batches * share))


async def _round(
    bed: Bed, streams: RawStreams, drivers: Mapping[str, Driver], *, tokens: int
) -> list[Figure]:
    """Each has its turn: streams, Redis, and our pushes in every form."""
    count = streams.count
    pushed, fetched = await streams.measure()
    stored, read = await measure_redis(bed, streams.message, count=count)
    raw = _Raw(pushed=pushed, fetched=fetched, stored=stored, read=read)
    figures = _raw_figures(raw, tokens=tokens, count=count)
    for form, driver in drivers.items():
        num_batches = count // (GROUP * driver.groups_per_step)
        moved = await _moved(bed, driver, form, tokens=tokens, num_batches=num_batches)
        figures += _push_figures(form, tokens, count, *moved, raw)
    return figures


async def _moved(
    bed: Bed, driver: Driver, form: str, *, tokens: int, num_batches: int
) -> tuple[Spent, Spent]:
    """Push these batches and fetch them; what either took. No bytes travel after a fetch, so the clock stops, while the
    CPU time of what follows it belongs to the batch.
    """
    episodes, first, fetching_s = Episodes(driver.run_id, num_response=tokens), driver.step, 0.0
    leases = await driver.leased(num_batches * driver.groups_per_step, prefix=f"{first}-{num_batches}-")
    async with bed.spending_until_synced() as pushed:
        await driver.push(leases, episodes, packed=form == "packed")
    with bed.spending() as fetched:
        for _ in range(num_batches):
            began_s = time.perf_counter()
            batch = await driver.acquire()
            await driver.fetch()
            fetching_s += time.perf_counter() - began_s
            await driver.finish(batch)
    fetched.seconds = fetching_s
    return pushed, fetched


def _raw_figures(raw: _Raw, *, tokens: int, count: int) -> list[Figure]:
    stream = partial(Figure, subject="raw gRPC stream", unit="µs")
    redis = partial(Figure, subject="raw Redis", unit="µs")
    return [
        stream(what=f"push {tokens}: server CPU", value=1e6 * raw.pushed.cpu_s / count),
        stream(what=f"fetch {tokens}: server CPU", value=1e6 * raw.fetched.cpu_s / count),
        redis(what=f"push {tokens}: Redis CPU", value=1e6 * raw.stored.cpu_s / count),
        redis(what=f"fetch {tokens}: Redis CPU", value=1e6 * raw.read.cpu_s / count),
        stream(what=f"push {tokens}: rate", value=count / raw.pushed.seconds, unit="trajectories/s"),
        stream(what=f"fetch {tokens}: rate", value=count / raw.fetched.seconds, unit="trajectories/s"),
    ]


def _push_figures(
    form: str, tokens: int, count: int, pushed: Spent, fetched: Spent, raw: _Raw
) -> list[Figure]:
    is_target = tokens == _TYPICAL
    row = partial(Figure, subject=f"AstraFlow, {form}")
    cpu, share = partial(row, unit="µs"), partial(row, unit="×")
    server_cpu = (pushed.server_s + fetched.server_s) / _some(raw.pushed.cpu_s + raw.fetched.cpu_s)
    calls = pushed.commands["fcall"]
    return [
        cpu(what=f"push {tokens}: server CPU", value=1e6 * pushed.server_s / count),
        cpu(what=f"fetch {tokens}: server CPU", value=1e6 * fetched.server_s / count),
        cpu(what=f"push {tokens}: Redis CPU", value=1e6 * pushed.redis_s / count),
        cpu(what=f"fetch {tokens}: Redis CPU", value=1e6 * fetched.redis_s / count),
        row(what=f"push {tokens}: rate", value=count / pushed.seconds, unit="trajectories/s"),
        row(what=f"fetch {tokens}: rate", value=count / fetched.seconds, unit="trajectories/s"),
        row(what=f"push {tokens}: function calls", value=calls / count, unit="a trajectory"),
        row(
            what=f"push {tokens}: Redis commands",
            value=pushed.num_commands / count,
            unit="a trajectory",
            most=_MOST_COMMANDS[form],
        ),
        share(
            what=f"push + fetch {tokens}: server CPU over raw streams",
            value=server_cpu,
            most=_MOST_SERVER_CPU[form] if is_target else None,
        ),
        share(
            what=f"push {tokens}: Redis CPU over raw SET",
            value=pushed.redis_s / _some(raw.stored.cpu_s),
            most=_MOST_REDIS_CPU[form] if is_target else None,
        ),
        share(
            what=f"push {tokens}: rate over the raw stream",
            value=raw.pushed.seconds / pushed.seconds,
            least=_LEAST_PUSHED if is_target else None,
        ),
        share(
            what=f"fetch {tokens}: rate over the raw stream",
            value=raw.fetched.seconds / fetched.seconds,
            least=_LEAST_FETCHED if is_target else None,
        ),
    ]


def _published_s(count: int) -> float:
    buffer, num_tokens = PublishedBuffer(), PROMPT_TOKENS + _TYPICAL
    for version in range(count):
        buffer.add(np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32), version=version)
    began_s = time.perf_counter()
    buffer.batch(count)
    return time.perf_counter() - began_s


def _some(cpu_s: float) -> float:
    """CPU time is counted in ticks of 10 ms; a toy size may take none."""
    return max(cpu_s, 0.01)

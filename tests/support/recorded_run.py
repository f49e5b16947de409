"""A run as it is after 100,000 steps on 64 nodes, made in seconds: its series, nodes, versions, events and samples.

What a trainer and nodes would have told the server is written where it keeps it; the figures are drawn from a seed, so
that pictures of it change only with the page. `pages` serves the page of a server that is in the test's own loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.columns import Columns, decode_columns, encode_columns
from astraflow.dataflow.v1 import version_pb2
from astraflow.dataflow.v1.batch_pb2 import BatchItem
from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.rollout.v1.trajectory_pb2 import Trajectory, TurnSpan
from astraflow_archive import trainer_logprobs
from astraflow_archive.archive import Archive
from astraflow_archive.columns import Row
from astraflow_dataflow.dashboard.site import BUNDLE, Dashboard
from astraflow_dataflow.store.keys import Keys
from astraflow_kit.lifecycle import Lifecycle
from astraflow_kit.pages import Pages
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import open_store
from support.dataflow_world import World
from support.published_models import ModelPublisher
from support.weight_models import make_model

REGIONS = ("eu-west", "us-east", "ap-south")
POOLS = ("h100", "a100", "spot")
_CHUNK = 500
Floats = NDArray[np.float64]
_STEP_MS = 6000
_OF_ROLE = (("reward_mean", 0.0), ("reward_p10", -0.2), ("reward_p90", 0.15))


@asynccontextmanager
async def pages(world: World, *, bundle: Path = BUNDLE, port: int = 0) -> AsyncIterator[str]:
    """The pages of the world's server, by their address."""
    life = Lifecycle(drain_timeout_s=1)
    dataflow = world.dataflow
    site = Dashboard(
        dataflow.registrations(),
        registry=dataflow.registry,
        archives=dataflow.archives,
        ending=life.drain,
        bundle=bundle,
    )
    settings = dataflow.settings.model_copy(update={"http_port": port})
    served = Pages(settings, life=life, metrics=dataflow.metrics, status=dataflow.status, site=site)
    await served.start()
    running = asyncio.create_task(served.run())
    try:
        yield served.address
    finally:
        life.drain.set()
        await served.stop(deadline_s=2)
        await asyncio.wait_for(running, 60)


@dataclass(frozen=True)
class Turn:
    """One turn of a made-up sample."""

    role: str
    text: str


EPISODE = (
    Turn("system", "Use the calculator for arithmetic.\n"),
    Turn("user", "How many eggs are in 17 boxes of 12?\n"),
    Turn("assistant", 'I multiply. {"tool": "calculator", "expression": "17 * 12"}\n'),
    Turn("tool", "204\n"),
    Turn("assistant", "There are 204 eggs.\n"),
)


WRONG = (*EPISODE[:2], Turn("assistant", "17 times 12 is 194, I think. There are 194 eggs.\n"))


async def record(
    world: World,
    store_uri: str,
    *,
    name: str = "recorded",
    num_steps: int = 100_000,
    num_nodes: int = 64,
    policies: Sequence[str] = ("solver", "verifier"),
    samples: Sequence[Sequence[Turn]] = (EPISODE, WRONG, EPISODE, WRONG),
    hostile: Sequence[str] = (),
) -> None:
    """Make the run; each of `hostile` is put wherever a node, a task or an exception may speak."""
    await world.create_run(
        name=name, store_uri=store_uri, dataset="Unevaluated", policies=policies, archive="{}"
    )
    for number, policy in enumerate(policies, 1):
        await world.trainer(policy)
        await _write_steps(world, policy, num_steps, seed=number)
    await _write_nodes(world, num_nodes, policies, hostile=hostile)
    await asyncio.to_thread(_write_samples, store_uri, name, policies[0], samples, num_steps, bool(hostile))


async def _write_steps(world: World, policy: str, num_steps: int, *, seed: int) -> None:
    table = figures(num_steps, seed=seed)
    names, rows = "\n".join(sorted(table)), np.stack([table[name] for name in sorted(table)], axis=1)
    keys, redis = Keys(world.run_id), world.dataflow.connection
    now_ms = int(time.time() * 1000)
    await redis.raw("HSET", keys.of("series_names", policy), names, 0)
    for first in range(0, num_steps, _CHUNK):
        await redis.raw_many(
            (
                *("XADD", keys.of("series", policy), f"{step + 1}-1"),
                *("ms", now_ms - (num_steps - step) * _STEP_MS, "names", 0),
                *("values", rows[step].astype("<f4").tobytes(), "counts", _counts(step)),
            )
            for step in range(first, min(first + _CHUNK, num_steps))
        )
    await redis.raw("HSET", keys.of("policy", policy), "finished", num_steps, "durable", num_steps)
    newest = num_steps
    for version in range(max(0, newest - 200), newest + 1):
        message = version_pb2.Version(
            policy_id=policy, version=version, sequence=version, manifest_sha256=b"." * 32, step=version,
            delta_bytes=(61_000_000 + version % 37 * 400_000) // seed, density=(0.016 + version % 11 * 0.0004) / seed,
        )  # fmt: skip
        stored = b"%d sha " % (now_ms - (newest - version) * _STEP_MS) + message.SerializeToString()
        await redis.raw("HSET", keys.of("versions", policy), version, stored)
    await redis.raw("HSET", keys.of("policy", policy), "version", newest)
    await _write_evaluations(world, policy, num_steps, rewards=table["reward_mean"])
    await redis.raw("RPUSH", keys.of("recent", policy), *[f"{reward:.2f} 1" for reward in (0.9, 0.85)])
    for age, bound in ((0, 900_000), (1, 300_000), (2, 60_000), (3, 900)):
        await redis.raw("HSET", keys.of("staleness", policy), age, bound)


async def _write_evaluations(world: World, policy: str, num_steps: int, *, rewards: Floats) -> None:
    """About twenty, each a little below the reward of its step."""
    keys, redis = Keys(world.run_id), world.dataflow.connection
    for version in range(0, num_steps, max(1, num_steps // 20)):
        name, total = f"{policy}-{version}", f"{256 * (rewards[version] - 0.05):.3f}"
        await redis.raw(
            *("HSET", keys.of("evaluation", name), "versions", f"{policy} {version}", "state", "complete"),
            *("planned", 256, "done", 256, f"samples {policy}", 256),
            *(f"s reward {policy} {policy}", total, f"n reward {policy} {policy}", 256),
        )
        await redis.raw("ZADD", keys.of("evaluations"), version, name)


def _counts(step: int) -> str:
    told = {"ready": step % 24, "outstanding": 90 + step % 31, "leases": 96, "ingested": step * 128}
    told |= {"tool_calls": step * 300, "tool_errors": step * 18}
    told |= {"dropped.stale": step // 3, "dropped.filtered": step * 5, "dropped.superseded": step // 200}
    return "\n".join(f"{name} {number}" for name, number in told.items())


def figures(num_steps: int, *, seed: int) -> dict[str, Floats]:
    """The figures of a run that learns, from a seed."""
    draw = np.random.default_rng(seed)
    at = np.arange(num_steps) / max(1, num_steps)

    def noise(size: float) -> Floats:
        return draw.normal(0, size, num_steps)

    reward = np.clip(0.24 / seed + 0.65 * (1 - np.exp(-5 * at / seed)) + noise(0.03), 0, 1)
    wait = np.clip(3.4 - 1.2 * at + noise(0.3), 0.1, None)
    return {
        "reward_mean": reward,
        "reward_p10": np.clip(reward - 0.25 + noise(0.02), 0, 1),
        "reward_p50": reward,
        "reward_p90": np.clip(reward + 0.2 + noise(0.02), 0, 1),
        "num_groups": np.full(num_steps, 16.0),
        "num_zero_variance_groups": np.clip(2 + 6 * at + noise(1), 0, 16),
        "truncated_fraction": np.clip(0.12 * (1 - at) + noise(0.01), 0, 1),
        "mismatch_kl": np.abs(0.0009 + noise(0.0002)),
        "ratio_max": 1.3 + np.abs(noise(0.3)),
        "ratio_mean": 1 + noise(0.002),
        "ratio_p99": 1.12 + np.abs(noise(0.02)),
        "turns_mean": 3 + 0.5 * at + np.abs(noise(0.2)),
        "clip_fraction_up": np.abs(0.012 + noise(0.003)),
        "clip_fraction_down": np.abs(0.007 + noise(0.002)),
        "entropy": 0.62 - 0.35 * at + noise(0.01),
        "grad_norm": np.abs(0.4 + noise(0.08)),
        "loss": noise(0.02),
        **{f"{name}/proposer": reward + offset for name, offset in _OF_ROLE},
        **{f"{name}/checker": 0.8 * reward + offset for name, offset in _OF_ROLE},
        "staleness_mean": np.clip(1.1 + noise(0.2), 0, None),
        "staleness_in_flight_mean": np.clip(0.4 + noise(0.1), 0, None),
        "staleness_in_queue_mean": np.clip(0.7 + noise(0.1), 0, None),
        "staleness_max": np.clip(np.round(3 + noise(0.8)), 0, None),
        "num_stale_tokens": np.clip(300 + noise(80), 0, None),
        "completion_tokens_mean": 600 + 350 * at + noise(30),
        "completion_tokens_p50": 520 + 320 * at + noise(30),
        "completion_tokens_p90": 1300 + 500 * at + noise(60),
        "completion_tokens_max": 2800 + 900 * at + np.abs(noise(200)),
        "num_trained_trajectories": np.full(num_steps, 128.0),
        "num_version_spans_max": np.clip(np.round(2 + noise(0.6)), 1, None),
        "wait_s": wait,
        "train_s": np.clip(4.6 + noise(0.2), 1, None),
        "publish_wait_s": np.abs(noise(0.05)),
        "checkpoint_wait_s": np.abs(noise(0.02)),
        "num_tokens": 82_000 + 40_000 * at + noise(3000),
        "learning_rate": 1e-6 * (1 - 0.9 * at),
        "fetched_bytes": 900_000 + noise(50_000),
    }


async def _write_nodes(
    world: World, num_nodes: int, policies: Sequence[str], *, hostile: Sequence[str]
) -> None:
    redis = world.dataflow.connection
    newest = int(await redis.raw("HGET", Keys(world.run_id).of("policy", policies[0]), "version") or 0)  # type: ignore[arg-type]
    for number in range(num_nodes):
        node_id = f"node-{number:02d}"
        pool, region = POOLS[number % 3], REGIONS[number // 3 % 3]
        node = await world.node(
            node_id, max_concurrent_tasks=32, pool=pool, region=region,
            hardware=hostile[number] if hostile else f"8 × {pool.upper()}",
        )  # fmt: skip
        lag = 2 if number == 7 else number % 5 == 0
        loads = [
            {
                "policyId": each,
                "running": 20,
                "waiting": number % 4,
                "slots": 32,
                "kvUsage": 0.5 + number % 8 / 20,
            }
            | {"tokensPerS": 2100.0 + number * 7}
            for each in policies
        ]
        serving = {each: max(0, newest - int(lag)) for each in policies}
        fields: dict[str, str | int] = {
            "serving": json.dumps(serving), "tokens": 10**9 + number, "engine_restarts": int(number == 3),
            "waiting_for": "" if number % 9 else "staleness_window", "engine_loads": json.dumps(loads),
            "follow_ms": 4000 + 2500 * (number // 3 % 3) + 20 * number,
        }  # fmt: skip
        connected_ms = 0 if number == num_nodes - 1 else 3_600_000
        held = [f"task-{number}-{place}" for place in range(25 + number % 7)]
        await redis.raw("SADD", Keys(world.run_id).of("node_leases", node_id), *held)
        await node.report(connected_ms=connected_ms, fields=fields)
    for number, said in enumerate(hostile):
        kept: dict[str, str | int] = {
            f"first {number}": f"1\nnode-00\n{said}\n{said[:64]}\n{said}", f"count {number}": 3, f"last {number}": 2,
            f"row training {number}": 3, f"after training {number}": 0, "completed training": 0,
        }  # fmt: skip
        flat: list[str | int] = [part for item in kept.items() for part in item]
        await redis.raw("HSET", Keys(world.run_id).of("failures"), *flat)
        event = ("kind", "task_failed", "subject", said, "detail", said)
        await redis.raw("XADD", Keys(world.run_id).of("history"), "*", *event)


def _write_samples(
    store_uri: str, run_id: str, policy: str, samples: Sequence[Sequence[Turn]], step: int, hostile: bool
) -> None:
    store = open_store(store_uri)
    pieces = list(dict.fromkeys(piece for turns in samples for turn in turns for piece in _pieces(turn.text)))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    folder = Path(store_uri.removeprefix("file://")).parent
    # As added tokens, whose text is what it says.
    added = [{"id": number, "content": piece} for piece, number in vocabulary.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": added}))
    writer = VersionWriter.open(store, run_id=run_id, policy_id=policy, epoch=1)
    ModelPublisher(writer, assets=[folder / "tokenizer.json"]).publish(make_model(), step=0)
    rows = [
        _row(turns, vocabulary, policy=policy, step=step, number=number, hostile=hostile)
        for number, turns in enumerate(samples)
    ]
    judged = {row.sample.item.trajectory_id: _trainer_logprobs(row) for row in rows}
    trainer_logprobs.write(store, run_id, policy_id=policy, step=step, logprobs=judged)
    Archive(store, run_id).add(rows, span="1700000000000-0_1700000000001-0")


def _trainer_logprobs(row: Row) -> NDArray[np.float32]:
    columns = decode_columns(Trajectory.FromString(row.body))
    apart = np.sin(np.arange(len(columns.token_ids)) * 1.7) * 0.5
    return np.where(columns.loss_mask, np.minimum(columns.logprobs + apart, 0), np.nan).astype(np.float32)


def _pieces(text: str) -> list[str]:
    """Words with the blank before them; what a test wants whole has no blank in it."""
    words = text.split(" ")
    return [words[0], *(f" {word}" for word in words[1:])]


def _row(
    turns: Sequence[Turn], vocabulary: dict[str, int], *, policy: str, step: int, number: int, hostile: bool
) -> Row:
    ids: list[int] = []
    mask: list[bool] = []
    spans = []
    for turn in turns:
        mine = [vocabulary[piece] for piece in _pieces(turn.text)]
        spans.append(TurnSpan(start=len(ids), end=len(ids) + len(mine), role=turn.role[:64]))
        ids += mine
        mask += [turn.role == "assistant"] * len(mine)
    trained = np.array(mask)
    logprobs = np.where(trained, -0.2 - np.arange(len(ids)) % 5 * 0.4, 0.0).astype(np.float32)
    first = int(np.argmax(trained)) if trained.any() else 0
    middle = (first + len(ids)) // 2 + 1
    columns = Columns(
        token_ids=np.array(ids, np.int32),
        loss_mask=trained,
        logprobs=logprobs,
        version_spans=((first, middle, step - 2), (middle, len(ids), step - 1)),
    )
    said = turns[0].text.strip() if hostile else ""
    trajectory_id = said or f"task-{number // 4:05d}.{number % 4}.solver"
    body = encode_columns(columns, trajectory_id=trajectory_id)
    body.turn_spans.extend(spans)
    item = BatchItem(
        trajectory_id=trajectory_id, group_id=f"g{number // 4}", task_id=said or f"task-{number // 4:05d}",
        num_tokens=len(ids), num_trainable_tokens=int(trained.sum()), reward=float(number % 2 == 0),
        min_version=step - 2, max_version=step - 1, source=said or ("arithmetic", "word-problems")[number % 2],
        role=said[:64], member=number % 4,
    )  # fmt: skip
    sample = Sample(
        policy_id=policy, step=step, reason="trained", batch_id=f"{policy}-{step}-1", item=item,
        episode_id=said or f"task-{number // 4:05d}.{number % 4}",
    )  # fmt: skip
    sample.end_time.GetCurrentTime()
    return Row(sample, body.SerializeToString())

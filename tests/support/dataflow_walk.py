"""A seeded walk through the contract of the dataflow server, with a journal of its own.

The server's counts, the ids in batches and the journal are compared without trusting each other. Used by the
conservation tests, on every Redis they run on.
"""

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.dataflow.v1 import batch_pb2, trace_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.errors import InvalidArgumentError, NotFoundError, PreconditionError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.rules.conservation import drift
from support.dataflow_world import Node, Trainer, World, served

INTENT = batches.BATCH_STAGE_INTENT
TRAINED = batches.BATCH_STAGE_TRAINED
SKIPPED = batches.BATCH_STAGE_SKIPPED
RETURN, DISCARD = batches.VOID_ACTION_RETURN, batches.VOID_ACTION_DISCARD
COUNTED = {"ACCEPTED", "ACCEPTED_LATE", "SUPERSEDED", "FENCED", "LATE_CLOSED", "POISON"}
KEPT = {"ACCEPTED", "ACCEPTED_LATE"}


@dataclass
class Walk:
    """One seeded history."""

    rng: random.Random
    world: World
    nodes: list[Node] = field(default_factory=list)
    trainer: Trainer | None = None
    leases: list[tuple[Node, task_pb2.Lease]] = field(default_factory=list)
    pushed: list[tuple[Node, trajectory_pb2.Episode]] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)
    """Accepted episodes of tasks that were requeued afterwards: their groups are gone."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Episode id → first outcome that was not a duplicate."""
    trajectories: dict[str, int] = field(default_factory=dict)
    """Episode id → trajectories it carried."""
    trained: dict[int, list[str]] = field(default_factory=dict)
    """Step → trajectory ids the trainer recorded."""
    skipped: dict[int, list[str]] = field(default_factory=dict)
    batch: batch_pb2.Batch | None = None
    step: int = 1
    version: int = 0
    number: int = 0
    checks: int = 0

    async def run(self, steps: int) -> None:
        """Take random steps, checking the counts after each."""
        for _ in range(steps):
            move = self.rng.choice(self._moves())
            await move()
            await self.check()

    def _moves(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self.lease, self.push, self.push, self.push, self.push, self.train]
        rare = [self.repeat, self.poison, self.fail, self.expire, self.give_back, self.replace_trainer]
        return [*often * 3, *rare, self.rejoin, self.durable, self.sweep, self.void, self.requeue]

    async def lease(self) -> None:
        node = self.rng.choice(self.nodes)
        self.leases += [(node, lease) for lease in await node.lease(3, wait_s=0)]

    async def push(self) -> None:
        """An episode of any lease ever given, current or not."""
        if not self.leases:
            return
        node, lease = self.rng.choice(self.leases[-12:])
        self.number += 1
        episode = node.episode(
            lease,
            self.rng.randrange(lease.task.group_size),
            episode_id=f"e{self.number}",
            version=self.rng.choice([self.version, max(0, self.version - 2)]),
            reward=float(self.rng.randrange(2)),
            failed=self.rng.random() < 0.05,
            hedge=self.rng.random() < 0.1,
        )
        await self._push(node, episode)

    async def repeat(self) -> None:
        if self.pushed:
            await self._push(*self.rng.choice(self.pushed))

    async def poison(self) -> None:
        if self.leases:
            node, lease = self.rng.choice(self.leases)
            self.number += 1
            episode = node.episode(lease, 0, episode_id=f"bad{self.number}", reward=float("nan"))
            await self._push(node, episode)

    async def _push(self, node: Node, episode: trajectory_pb2.Episode) -> None:
        outcome = await node.outcome(episode)
        self.pushed.append((node, episode))
        if outcome != "DUPLICATE":
            first = self.outcomes.setdefault(episode.episode_id, outcome)
            assert first == outcome or first in COUNTED, (first, outcome)
            self.trajectories[episode.episode_id] = len(episode.trajectories)
        else:
            assert self.outcomes[episode.episode_id] in KEPT | {"POISON"}, episode.episode_id

    async def fail(self) -> None:
        if self.leases:
            node, lease = self.rng.choice(self.leases)
            reason = self.rng.choice(["workflow_error", "drain", "version_unavailable"])
            await node.fail(lease, reason, retryable=self.rng.random() < 0.9)

    async def expire(self) -> None:
        """All leases run out at once, as after a long pause."""
        key = "af:{run}:leases"
        for task in await self.world.dataflow.connection.raw("ZRANGE", key, 0, -1) or ():  # type: ignore[union-attr]
            await self.world.dataflow.connection.raw("ZADD", key, 0, task)  # type: ignore[arg-type]
        await self.sweep()

    async def sweep(self) -> None:
        context = await self.world.dataflow.registry.get("run")
        await self.world.dataflow.store.tasks.sweep("run", limit=100)
        await self.world.dataflow.settling.settle_left_behind(context, least_age_s=0.0)

    async def train(self) -> None:
        assert self.trainer is not None
        reply = await self.trainer.acquire(self.step, base_version=self.version, wait_s=0)
        if not reply.HasField("batch"):
            return
        assert self.batch in (None, reply.batch), "a bound batch changed"
        self.batch = reply.batch
        await self.trainer.ack(self.batch, INTENT)
        if self.rng.random() < 0.5:
            return
        ids = [item.trajectory_id for item in self.batch.items]
        bodies = await self.trainer.fetch(self.step)
        assert [item.trajectory_id for item in bodies] == ids
        skip = self.rng.random() < 0.2
        await self.trainer.ack(self.batch, SKIPPED if skip else TRAINED)
        (self.skipped if skip else self.trained)[self.step] = ids
        if not skip:
            self.version += 1
            await self.trainer.publish(version=self.version, step=self.step)
        self.step, self.batch = self.step + 1, None

    async def give_back(self) -> None:
        assert self.trainer is not None
        with contextlib.suppress(PreconditionError):
            await self.rng.choice([self.trainer.nack, self.trainer.quarantine])(self.step)
            self.batch = None

    async def void(self) -> None:
        """An operator takes the bound batch away."""
        if self.batch is None:
            return
        with contextlib.suppress(NotFoundError):  # the trainer gave it back before
            await self.world.void(self.batch, self.rng.choice([RETURN, DISCARD]))
        self.batch = None

    async def requeue(self) -> None:
        """Dead tasks run anew; what came before was dropped with their groups."""
        await self.sweep()
        letters = (await self.world.dead_letters(page_size=500)).dead_letters
        again = {letter.task_id for letter in letters}
        assert await self.world.requeue() == (len(letters), 0, 0)
        self.retired |= {
            episode.episode_id
            for _, episode in self.pushed
            if episode.task_id in again and self.outcomes.get(episode.episode_id) in KEPT
        }

    async def replace_trainer(self) -> None:
        self.trainer = await self.world.trainer()

    async def rejoin(self) -> None:
        node = self.nodes[self.rng.randrange(len(self.nodes))]
        node.credential = (
            await self.world.node(node.node_id)
        ).credential  # what it was leased before stays its own

    async def durable(self) -> None:
        assert self.trainer is not None
        with contextlib.suppress(InvalidArgumentError):
            await self.trainer.mark_durable(self.rng.randrange(self.step + 1))

    async def check(self) -> None:
        """The server's account balances, its counters agree with a recount, and the journal agrees with both."""
        context = await self.world.dataflow.registry.get("run")
        audit, account = await self.world.dataflow.reporting.recount(context)
        assert account.conservation_error == 0, account
        assert [
            (policy.outstanding, policy.charged)
            for policy in audit.policies
            if policy.outstanding != policy.charged
        ] == []
        assert set(drift(audit, trained_in_log=account.trained).values()) == {0}
        self.checks += 1
        in_slices = (
            await self.world.dataflow.store.audits.recount("run", most=3) if self.checks % 8 == 0 else None
        )
        assert in_slices is None or set(in_slices.drift.values()) | set(in_slices.credit.values()) == {0}
        ends = self.outcomes.items()
        counted = {name: self.trajectories[name] for name, outcome in ends if outcome in COUNTED}
        assert account.ingested == sum(counted.values())
        assert account.trained == sum(map(len, self.trained.values()))
        assert account.dropped.get("skipped", 0) == sum(map(len, self.skipped.values()))
        kept = sum(counted[name] for name, outcome in ends if outcome in KEPT)
        turned_away = ("superseded", "fenced", "late_closed", "poison")
        at_the_door = sum(account.dropped.get(reason, 0) for reason in turned_away)
        assert account.ingested - at_the_door == kept

    async def check_traces(self) -> None:
        """The traces of all tasks, put together, say the same as the counts."""
        found: Counter[str] = Counter()
        context = await self.world.dataflow.registry.get("run")
        for task_id in {episode.task_id for _, episode in self.pushed}:
            trace = await self.world.dataflow.reporting.trace(context, task_id)
            assert not trace.truncated
            for item in trace.trajectories:
                place = trace_pb2.TrajectoryPlace.Name(item.place).removeprefix("TRAJECTORY_PLACE_").lower()
                reason, _, _ = item.drop_reason.partition(
                    ": "
                )  # behind it, why a trainer did not take a batch
                found[reason or place] += 1
        account = (await self.world.status()).trajectories
        places = ("trained", "in_batch", "ready", "assembling")
        expected = Counter({place: getattr(account, place) for place in places})
        expected += Counter({reason: n for reason, n in account.dropped.items() if reason != "poison"})
        found.pop("poison", None)  # quarantined episodes are not listed trajectory by trajectory
        assert found == expected, (found - expected, expected - found)

    def check_ids(self) -> None:
        """No trajectory was trained twice, none that was not accepted, and groups were whole."""
        used = [item for ids in [*self.trained.values(), *self.skipped.values()] for item in ids]
        assert not [item for item, times in Counter(used).items() if times > 1]
        kept = {name for name, outcome in self.outcomes.items() if outcome in KEPT}
        accepted = {f"{name}.solver" for name in kept - self.retired}
        assert set(used) <= accepted
        task_of = {f"{episode.episode_id}.solver": episode.task_id for _, episode in self.pushed}
        members = Counter(task_of[name] for name in accepted)
        for ids in [*self.trained.values(), *self.skipped.values()]:
            for task, size in Counter(task_of[item] for item in ids).items():
                assert size == members[task], f"group of {task} was served in part"


@asynccontextmanager
async def walking(
    url: str, folder: Path, seed: int, *, kind: type[Walk] = Walk, **recipe: object
) -> AsyncIterator[Walk]:
    """A walk over a new run with two nodes and a trainer."""
    async with served(url, folder) as world:
        await world.create_run(
            dataset="Counting",
            group_size=2,
            max_attempts=2,
            max_poison=0,
            filters='["astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage"]',
            evaluation="{every_versions: 0, num_samples: 1, final_samples: 1}",
            **recipe,  # type: ignore[arg-type]
        )
        walk = kind(rng=random.Random(seed), world=world)
        walk.trainer = await world.trainer()
        walk.nodes = [await world.node("n1"), await world.node("n2")]
        yield walk

"""Two dataflow servers over one Redis, driven by Hypothesis and compared with `dataflow_model`, call by call.

Each call goes to one of the two servers; either may be killed while calls are on their way. Every call's answer is the
model's, and after each the trajectories, the credit and the leases are where the model has them. Used by the stateful
test and by `dataflow_tour`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.errors import AstraflowError
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.store.batches import stage_name
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.packs import Place
from astraflow_dataflow.store.replies import as_int, as_mapping, as_text
from support.dataflow_model import FLOOR, GROUP_SIZE, GROUPS_PER_STEP, MAX_ATTEMPTS, MAX_STALENESS, Model
from support.dataflow_world import Node, Trainer, World, outcome_name, served

Result = TypeVar("Result")
STAGES = {
    "intent": batches.BATCH_STAGE_INTENT,
    "trained": batches.BATCH_STAGE_TRAINED,
    "skipped": batches.BATCH_STAGE_SKIPPED,
}
FILTER = '["astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage"]'
any_of = st.integers(0, 1 << 16)
"""Which of those there are, modulo their number."""


class Plane:
    """Two servers that live as long as the test, in a thread of their own, and are replaced when they are killed."""

    def __init__(self, url: str, folder: Path, *, payloads: str | None = None) -> None:
        self._url, self._folder, self.payloads = url, folder, payloads
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dataflow servers", daemon=True)
        self._thread.start()
        self._stacks = [AsyncExitStack(), AsyncExitStack()]
        self.worlds = [self._start(0), self._start(1)]
        self.runs: Iterator[object] = itertools.count()

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for work in the servers' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def replace(self, server: int) -> None:
        """End a server, whatever it is doing, and start another one."""
        run_id = self.worlds[server].run_id
        self.do(self._stacks[server].aclose())
        self.worlds[server] = self._start(server)
        self.worlds[server].run_id = run_id

    def close(self) -> None:
        """End both."""
        for stack in self._stacks:
            self.do(stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, server: int) -> World:
        folder = self._folder / str(server)
        folder.mkdir(exist_ok=True)
        return self.do(
            self._stacks[server].enter_async_context(served(self._url, folder, payloads=self.payloads))
        )


class DataflowMachine(RuleBasedStateMachine):
    """Random calls of two nodes and of old and new trainers."""

    plane: Plane

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.nodes: list[Node] = []
        self.trainers: list[Trainer] = []
        self.leases: list[tuple[Node, task_pb2.Lease]] = []
        self.pushed: list[tuple[Node, trajectory_pb2.Episode]] = []
        self.bound: dict[int, batch_pb2.Batch] = {}
        self.voided: batch_pb2.Batch | None = None
        """The last that was taken away, until another one is bound."""
        self.all_voided: set[str] = set()
        self.used: Counter[str] = Counter()

    @initialize(filters=st.booleans(), steps=st.integers(0, 2))
    def begin(self, filters: bool, steps: int) -> None:
        """A new run with two nodes, a trainer and version 0, or some steps later."""
        name = f"run-{next(self.plane.runs)}"
        one, other = self.plane.worlds
        self.model.filters = filters
        self._do(
            one.create_run(
                name=name,
                group_size=GROUP_SIZE,
                groups_per_step=GROUPS_PER_STEP,
                max_staleness=MAX_STALENESS,
                max_attempts=MAX_ATTEMPTS,
                min_acceptance=FLOOR,
                max_identical_failures=0,
                max_poison=0,
                lease_ttl_s=3600,
                group_deadline_s=86_400,
                filters=FILTER if filters else "[]",
                evaluation="{every_versions: 0, num_samples: 1, final_samples: 1}",
            )
        )
        other.run_id = one.run_id
        self.trainers = [self._do(one.trainer())]
        self.model.claim()
        self.model.version = 0
        self.nodes = [self._do(one.node("n1")), self._do(other.node("n2"))]
        for _ in range(steps):
            self.submit(4)
            self.work(0, 0, 3, (0.0, 1.0))
            self._do(self._settled(one))
            self.train(1)
        self.submit(6)

    # Nodes.

    @rule(server=any_of)
    def settle_twice(self, server: int) -> None:
        """Both servers settle what one push completed."""
        settle = Settling._settle

        async def twice(settling: Settling, *arguments: Any) -> int:
            return sum(await asyncio.gather(*(settle(settling, *arguments) for _ in range(2))))

        with patch.object(Settling, "_settle", twice):
            self.work(0, server, 1, (0.0, 1.0))

    @rule(count=st.integers(2, 6))
    def submit(self, count: int) -> None:
        """New tasks, and one that is known."""
        first = len(self.model.tasks)
        names = [f"t{number}" for number in range(max(0, first - 1), first + count)]
        self._do(self.plane.worlds[count % 2].submit(*names))
        self.model.submit(names)

    @rule(node=any_of, server=any_of, want=st.integers(1, 4))
    def lease(self, node: int, server: int, want: int) -> None:
        """A node asks for tasks."""
        asking = self._node(node, server)
        again, fresh = self.model.leases(want)
        leases = self._do(asking.lease(want, wait_s=0))
        self.leases += [(asking, lease) for lease in leases]
        names = [lease.task.task_id for lease in leases]
        assert names[again:] == fresh, (names, again, fresh)
        for lease in leases:
            self.model.lease(asking.node_id, lease)

    @rule(
        node=any_of,
        server=any_of,
        want=st.integers(1, 3),
        rewards=st.sampled_from([(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]),
    )
    def work(self, node: int, server: int, want: int, rewards: Sequence[float]) -> None:
        """A node does all of what it gets."""
        before = len(self.leases)
        self.lease(node, server, want)
        for worker, lease in self.leases[before:]:
            for member in lease.members:
                name = f"e{len(self.pushed)}"
                fields: dict[str, Any] = {"episode_id": name, "version": self.model.version}
                self._push(worker, worker.episode(lease, member, reward=rewards[member], **fields))
            self.model.now += 1

    @precondition(lambda self: self.leases)
    @rule(
        lease=any_of,
        server=any_of,
        member=st.integers(0, GROUP_SIZE - 1),
        reward=st.sampled_from([0.0, 1.0, 1.0, 0.0, float("nan")]),
        age=st.integers(0, 2),
        failed=st.integers(0, 4),
        hedge=st.integers(0, 5),
    )
    def push(
        self, lease: int, server: int, member: int, reward: float, age: int, failed: int, hedge: int
    ) -> None:
        """An episode of a lease, which may be over."""
        node, held = self._lease(lease, server)
        episode = node.episode(
            held,
            member,
            episode_id=f"e{len(self.pushed)}",
            version=max(0, self.model.version - age),
            reward=reward,
            failed=not failed,
            hedge=not hedge,
        )
        self._push(node, episode)

    @precondition(lambda self: self.leases)
    @rule(first=any_of, server=any_of, rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=4))
    def push_at_once(self, first: int, server: int, rewards: Sequence[float]) -> None:
        """Several episodes on their way through both servers: what is answered is so in one of their orders."""
        episodes = []
        for number, reward in enumerate(rewards):
            node, lease = self._lease(first + number // 2, server + number)
            name = f"e{len(self.pushed)}.{number}"
            episode = node.episode(
                lease, number % GROUP_SIZE, episode_id=name, version=self.model.version, reward=reward
            )
            episodes.append((Node(node.world, node.node_id, node.credential), episode))

        async def together() -> list[str]:
            return await asyncio.gather(*(node.outcome(episode) for node, episode in episodes))

        outcomes = self._do(together())
        self.pushed += episodes
        self.model = self._order_of([episode for _, episode in episodes], outcomes)

    @precondition(lambda self: self.leases)
    @rule(
        lease=any_of,
        server=any_of,
        members=st.lists(st.integers(0, GROUP_SIZE - 1), min_size=2, max_size=3),
        again=st.booleans(),
        equal=st.booleans(),
    )
    def push_together(
        self, lease: int, server: int, members: Sequence[int], again: bool, equal: bool
    ) -> None:
        """Several episodes of a lease in one message, with equal rewards or not, the newest push once more with them if
        it was this node's: each has the answer that it would have alone.
        """
        node, held = self._lease(lease, server)
        name, version = f"e{len(self.pushed)}", self.model.version
        episodes = [
            node.episode(
                held, member, episode_id=f"{name}.{n}", version=version, reward=float(n % 2 or equal)
            )
            for n, member in enumerate(members)
        ]
        episodes += [self.pushed[-1][1]] if again and self.pushed and self.pushed[-1][0] is node else []
        answers = self._do(node.pack(*episodes))
        assert [outcome_name(answer) for answer in answers] == [self.model.push(one) for one in episodes]
        self.pushed += [(node, episode) for episode in episodes]

    def _order_of(self, episodes: Sequence[trajectory_pb2.Episode], outcomes: Sequence[str]) -> Model:
        for order in itertools.permutations(range(len(episodes))):
            model = deepcopy(self.model)
            if all(model.push(episodes[index]) == outcomes[index] for index in order):
                return model
        raise AssertionError(f"in no order are the outcomes {outcomes}")

    @precondition(lambda self: self.pushed)
    @rule(episode=any_of, server=any_of)
    def push_again(self, episode: int, server: int) -> None:
        """A repetition of one of the last."""
        recent = self.pushed[-6:]
        node, pushed = recent[-1 - episode % len(recent)]
        node.world = self._world(server)
        self._push(node, pushed)

    @precondition(lambda self: self.leases and self.model.now % 8 == 0)
    @rule(lease=any_of, server=any_of, moments=st.integers(0, 60))
    def kill_a_server_during_a_push(self, lease: int, server: int, moments: int) -> None:
        """The node repeats what nobody answered: it counts once."""
        node, held = self._lease(lease, server)
        episode = node.episode(
            held, 0, episode_id=f"e{len(self.pushed)}", version=self.model.version, reward=1.0
        )

        async def interrupted() -> None:
            call = asyncio.create_task(node.outcome(episode))
            for _ in range(moments):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])

        self._do(interrupted())
        self.plane.replace(server % 2)
        node.world = self._world(server + 1)
        outcome, expected = self._do(node.outcome(episode)), self.model.push(episode)
        self.pushed.append((node, episode))
        assert outcome == expected or (outcome == "DUPLICATE" and expected.startswith("ACCEPTED"))

    @precondition(lambda self: self.leases)
    @rule(
        lease=any_of,
        server=any_of,
        reason=st.sampled_from(["drain", "workflow_error", "engine_down"]),
        retryable=st.booleans(),
    )
    def fail(self, lease: int, server: int, reason: str, retryable: bool) -> None:
        """A node gives a lease back, which it may not have any more."""
        node, held = self._lease(lease, server)
        free = reason != "workflow_error"
        expected = self.model.fail(node.node_id, held, free=free, retryable=retryable)
        assert self._do(node.fail(held, reason, retryable=retryable)) == expected
        if expected:
            self._redis("ZADD", "retry:train", "XX", 0, held.task.task_id)

    @precondition(lambda self: self._in_state("leased"))
    @rule(which=any_of, server=any_of)
    def expire_a_lease(self, which: int, server: int) -> None:
        """A node was not heard of for too long."""
        leased = self._in_state("leased")
        task_id = leased[which % len(leased)]
        self._redis("ZADD", "leases", "XX", 0, task_id)
        self._sweep(server)
        self.model.give_again(task_id)

    @precondition(lambda self: self._in_state("leased"))
    @rule(which=any_of, server=any_of, reason=st.sampled_from(["drain", "workflow_error"]))
    def fail_what_was_lost(self, which: int, server: int, reason: str) -> None:
        """A node gives back a lease that it lost, and has got again under another attempt."""
        for node, lease, _ in self._lost_and_leased_again(which, server):
            expected = self.model.fail(node.node_id, lease, free=reason == "drain", retryable=True)
            assert self._do(node.fail(lease, reason)) == expected

    @precondition(lambda self: self._in_state("leased"))
    @rule(which=any_of, server=any_of)
    def push_what_was_lost(self, which: int, server: int) -> None:
        """A node pushes under a lease that it lost, before and after what comes under the newer attempt."""
        for node, lease, again in self._lost_and_leased_again(which, server):
            for held, member in ((lease, 0), (again, 1), (lease, 1)):
                fields: dict[str, Any] = {"episode_id": f"e{len(self.pushed)}", "version": self.model.version}
                self._push(node, node.episode(held, member, reward=float(member), **fields))

    @precondition(lambda self: self._opened())
    @rule(which=any_of, server=any_of)
    def expire_a_group(self, which: int, server: int) -> None:
        """A task took longer than its group may."""
        opened = self._opened()
        task_id = opened[which % len(opened)]
        self._redis("ZADD", "open", "XX", 0, task_id)
        self._sweep(server)
        self.model.expire(task_id)

    @precondition(lambda self: self.model.letters)
    @rule(server=any_of)
    def requeue(self, server: int) -> None:
        """An operator lets dead tasks run anew."""
        assert self._do(self._world(server).requeue()) == (self.model.requeue(), 0, 0)

    @precondition(lambda self: self.model.now % 5 == 0)
    @rule(server=any_of)
    def switch_plugins(self, server: int) -> None:
        """An operator lets the run go on with a filter, or without it."""
        filters = not (self.model.filters if self.model.switched is None else self.model.switched)
        run = self._do(self._world(server).ask(runs.GetRunResponse)).run
        override = f"dataflow.filters={FILTER if filters else '[]'}"
        text = parse_recipe(run.recipe_yaml, overrides=[override]).yaml_text
        self._do(self._world(server).ask(runs.UpdateRunResponse, recipe_yaml=text))
        self.model.switch(filters)

    # Trainers.

    @rule(server=any_of)
    def replace_the_trainer(self, server: int) -> None:
        """Another trainer claims the policy; the old one goes on without knowing."""
        self.trainers = [*self.trainers[-2:], self._do(self._world(server).trainer())]
        assert self.trainers[-1].epoch == self.model.claim()

    @precondition(lambda self: len(self.model.ready) >= GROUPS_PER_STEP or self.model.now % 4 == 0)
    @rule(
        which=st.integers(0, 9),
        server=any_of,
        step=st.integers(-1, 2),
        behind=st.sampled_from([0, 1, -1, -2]),
    )
    def acquire(self, which: int, server: int, step: int, behind: int) -> None:
        """A trainer asks for a batch."""
        trainer, wanted = self._trainer(which, server), max(1, self.model.finished + step)
        base = max(0, self.model.version - behind)
        reply = self._try(trainer.acquire(wanted, base_version=base, wait_s=0))
        if self._is_fenced(trainer, reply):
            return
        expected = self.model.offer(wanted, base)
        self._was_answered(reply, expected if isinstance(expected, str) else (base, expected), step=wanted)

    def _was_answered(
        self, reply: Any, expected: str | tuple[int, set[tuple[int, int, str]]], *, step: int
    ) -> None:
        """A batch was asked for; expected are an error, what it waits for, or the version and what may be bound."""
        if isinstance(reply, str):
            assert reply == expected
        elif expected == "bound":
            assert reply.batch.batch_id == self.bound[step].batch_id
        elif isinstance(expected, str):
            assert reply.waiting_for == expected
        else:
            self._was_bound(reply.batch, *expected)

    def _was_bound(self, batch: batch_pb2.Batch, base: int, among: set[tuple[int, int, str]]) -> None:
        assert batch.base_version == base
        self.bound[batch.step], self.voided = batch, None
        names = [item.task_id for item in batch.items[::GROUP_SIZE]]
        self.model.bind(batch.step, names, base=base, among=among)

    @precondition(lambda self: self.model.batches)
    @rule(
        which=st.integers(0, 9), server=any_of, step=st.sampled_from([2, 2, 2, 1, 0, 3]), early=st.booleans()
    )
    def read_ahead(self, which: int, server: int, step: int, early: bool) -> None:
        """A trainer asks for the batch of the step after the one in hand, and may forget what that one makes."""
        trainer, wanted = self._trainer(which, server), max(1, self.model.finished + step)
        base = max(0, self.model.version + (0 if early else 1))
        reply = self._try(trainer.read_ahead(wanted, base_version=base))
        if self._is_fenced(trainer, reply):
            return
        self._was_answered(reply, self.model.offer_ahead(wanted, base), step=wanted)

    @precondition(lambda self: self.model.batches and self.model.now % 4 == 0)
    @rule(server=any_of, moments=st.integers(0, 60))
    def kill_a_server_that_reads_ahead(self, server: int, moments: int) -> None:
        """Whether it was bound or not: asked again, the other one says."""
        trainer, wanted = self._trainer(9, server), self.model.finished + 2

        async def interrupted() -> None:
            call = asyncio.create_task(trainer.read_ahead(wanted, base_version=max(0, self.model.version)))
            for _ in range(moments):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        self._do(interrupted())
        self.plane.replace(server % 2)
        self.read_ahead(9, server + 1, 2, True)

    @precondition(lambda self: self.bound)
    @rule(
        which=st.integers(0, 9),
        server=any_of,
        step=st.integers(0, 1),
        stage=st.sampled_from(["intent", "trained", "trained", "skipped"]),
        wrong=st.integers(0, 9),
    )
    def ack(self, which: int, server: int, step: int, stage: str, wrong: int) -> None:
        """A trainer records what it does with a batch."""
        steps = sorted(self.bound)
        trainer, batch = self._trainer(which, server), self.bound[steps[-1 - step % len(steps)]]
        named = {"step": batch.step, "batch_id": batch.batch_id, "stage": STAGES[stage]}
        digest = b"another".ljust(32, b".") if not wrong else batch.digest
        reply = self._try(trainer._ask(batches.AckBatchResponse, **named, digest=digest))
        if self._is_fenced(trainer, reply):
            return
        if (
            self.voided is not None
            and self.voided.step == batch.step
            and batch.step not in self.model.batches
        ):
            assert reply == "PreconditionError"
            return
        if not wrong and batch.step in self.model.batches:
            assert reply == "ConflictError"
            return
        was = self.model.batches.get(batch.step)
        before = was.stage if was else ""
        expected = self.model.ack(batch.step, stage)
        assert (reply if isinstance(reply, str) else stage_name(reply.stage)) == expected
        if expected == stage != before and stage in ("trained", "skipped"):
            self.used.update(item.trajectory_id for item in batch.items)

    @rule(server=any_of)
    def train(self, server: int, *, end: str = "trained") -> None:
        """A trainer does all that a step needs."""
        step = self.model.finished + 1
        self.acquire(9, server, 1, 0)
        if step in self.model.batches and step != self.model.ahead:
            place = sum(known > step for known in self.bound)
            self.ack(9, server, place, "intent", 1)
            self.ack(9, server + 1, place, end, 1)
            self.publish(9, server)

    @precondition(lambda self: len(self.model.ready) >= GROUPS_PER_STEP)
    @rule(server=any_of)
    def skip(self, server: int) -> None:
        """A trainer's guard refuses the step, which has no version."""
        self.train(server, end="skipped")

    @precondition(lambda self: self.bound)
    @rule(which=st.integers(0, 9), server=any_of, step=st.integers(0, 2), quarantine=st.booleans())
    def nack(self, which: int, server: int, step: int, quarantine: bool) -> None:
        """A trainer gives a batch back, for good or not."""
        trainer, wanted = self._trainer(which, server), max(1, self.model.finished + step)
        reply = self._try(trainer.quarantine(wanted) if quarantine else trainer.nack(wanted))
        if self._is_fenced(trainer, reply):
            return
        problem = self.model.give_back(wanted, dropped="quarantined" if quarantine else "")
        if problem == "NotFoundError":
            assert reply == 0
        else:
            assert reply == (problem or GROUPS_PER_STEP * (GROUP_SIZE if quarantine else 1))

    @precondition(lambda self: self.bound)
    @rule(server=any_of, discard=st.booleans())
    def void(self, server: int, discard: bool) -> None:
        """An operator takes a batch away, whoever holds it."""
        batch = self.bound[max(self.bound)]
        action = batches.VOID_ACTION_DISCARD if discard else batches.VOID_ACTION_RETURN
        reply = self._try(self._world(server).void(batch, action))
        if batch.batch_id in self.all_voided:
            assert not isinstance(reply, str), "a repetition has the same answer"
            return
        problem = self.model.give_back(batch.step, dropped="voided" if discard else "")
        groups = (0, GROUP_SIZE * GROUPS_PER_STEP) if discard else (GROUPS_PER_STEP, 0)
        assert reply == (problem or groups)
        if not problem:
            self.voided = batch
            self.all_voided.add(batch.batch_id)

    @precondition(lambda self: self.model.batches)
    @rule(which=st.integers(0, 9), server=any_of)
    def publish(self, which: int, server: int) -> None:
        """The version of the newest step that was trained on, unless it is announced."""
        step = self.model.finished
        batch = self.model.batches.get(step)
        if batch is None or batch.stage != "trained" or step not in self.model.unpublished:
            return
        trainer = self._trainer(which, server)
        reply = self._try(trainer.publish(version=self.model.version + 1, step=step))
        if not self._is_fenced(trainer, reply):
            assert not isinstance(reply, str), reply
            self.model.publish(step)

    @precondition(lambda self: self.model.finished)
    @rule(which=st.integers(0, 9), server=any_of, step=st.integers(-2, 1))
    def mark_durable(self, which: int, server: int, step: int) -> None:
        """A trainer's checkpoint covers a step."""
        trainer, wanted = self._trainer(which, server), max(1, self.model.finished + step)
        reply = self._try(trainer.mark_durable(wanted))
        if not self._is_fenced(trainer, reply):
            assert (reply if isinstance(reply, str) else "") == self.model.mark_durable(wanted)

    # What holds after each call.

    @invariant()
    def all_is_where_the_model_has_it(self) -> None:
        """Trajectories by place and reason, credit, leases; and nothing is used twice."""
        self.model.now += 1
        if not self.trainers:
            return
        world, model = self.plane.worlds[self.model.now % 2], self.model
        status = self._do(self._settled(world))
        account, (policy,) = status.trajectories, status.policies
        found = Counter(dict(account.dropped))
        found |= Counter(
            {name: getattr(account, name) for name in ("ingested", "assembling", "ready", "in_batch")}
        )
        found["trained"] = account.trained
        assert +found == +model.counts
        assert account.conservation_error == policy.credit_error == 0
        assert (policy.outstanding_groups, policy.credit) == (model.outstanding, model.credit)
        assert math.isclose(policy.acceptance, model.acceptance, rel_tol=1e-9)
        held = {node.node_id: node.leases for node in status.nodes}
        assert held == {
            name: sum((task.state, task.node) == ("leased", name) for task in model.tasks.values())
            for name in ("n1", "n2")
        }
        assert all(times == 1 for times in self.used.values())
        if self.plane.payloads:
            self._payloads_are_counted(world)

    def _payloads_are_counted(self, world: World) -> None:
        """Of each pack outside are needed as many payloads as refer to it, and it is there."""
        keys, (raw, payloads) = (
            Keys(world.run_id),
            (world.dataflow.connection.raw, world.dataflow.store.payloads),
        )
        owners = as_mapping(self._do(raw("HGETALL", keys.of("owners"))))
        needed = Counter(as_text(place).split(" ")[1] for place in owners.values())
        counted = as_mapping(self._do(raw("HGETALL", keys.of("packs"))))
        assert {pack: as_int(number) for pack, number in counted.items()} == needed
        places = [Place(as_text(place), name) for name, place in owners.items()]
        assert None not in self._do(payloads.read(world.run_id, places))

    async def _settled(self, world: World) -> Any:
        context = await world.dataflow.registry.get(world.run_id)
        await world.dataflow.settling.settle_left_behind(context, least_age_s=0.0)
        return await world.status()

    # Helpers.

    def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.plane.do(work)

    def _try(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The answer, or the name of the error."""
        try:
            return self._do(work)
        except AstraflowError as error:
            return type(error).__name__

    def _world(self, server: int) -> World:
        return self.plane.worlds[server % 2]

    def _node(self, node: int, server: int) -> Node:
        found = self.nodes[node % len(self.nodes)]
        found.world = self._world(server)
        return found

    def _lease(self, lease: int, server: int) -> tuple[Node, task_pb2.Lease]:
        """One of the last leases, current or not."""
        recent = self.leases[-8:]
        node, found = recent[lease % len(recent)]
        node.world = self._world(server)
        return node, found

    def _trainer(self, which: int, server: int) -> Trainer:
        """The newest one, but for a fifth of the calls."""
        trainer = self.trainers[-1] if which > 1 else self.trainers[which % len(self.trainers)]
        trainer.world = self._world(server)
        return trainer

    def _is_fenced(self, trainer: Trainer, reply: Any) -> bool:
        fenced = trainer.epoch != self.model.epoch
        assert (reply == "FencedError") == fenced
        return fenced

    def _lost_and_leased_again(
        self, which: int, server: int
    ) -> Iterator[tuple[Node, task_pb2.Lease, task_pb2.Lease]]:
        """What the first node had before a lease expired, and has again: node, old lease, new lease."""
        self.expire_a_lease(which, server)
        before = len(self.leases)
        self.lease(0, server, 4)
        again = {lease.task.task_id: lease for _, lease in self.leases[before:]}
        for node, lease in self.leases[:before]:
            if lease.task.task_id in again and node.node_id == self.nodes[0].node_id:
                node.world = self._world(server)
                yield node, lease, again[lease.task.task_id]

    def _push(self, node: Node, episode: trajectory_pb2.Episode) -> None:
        outcome = self._do(node.outcome(episode))
        expected = self.model.push(episode)
        assert outcome == expected, (outcome, expected)
        self.pushed.append((node, episode))

    def _in_state(self, *states: str) -> list[str]:
        return [task_id for task_id, task in self.model.tasks.items() if task.state in states]

    def _opened(self) -> list[str]:
        """Tasks whose groups have a deadline: since the first lease or episode."""
        return [
            task_id
            for task_id in self._in_state("queued", "leased", "retry")
            if self.model.tasks[task_id].state != "queued" or self.model.tasks[task_id].members
        ]

    def _redis(self, command: str, key: str, *values: object) -> None:
        world = self.plane.worlds[0]
        self._do(world.dataflow.connection.raw(command, f"af:{{{world.run_id}}}:{key}", *values))  # type: ignore[arg-type]

    def _sweep(self, server: int) -> None:
        world = self._world(server)
        self._do(world.dataflow.store.tasks.sweep(world.run_id, limit=100))
        self._do(self._settled(world))


def compare(
    url: str,
    folder: Path,
    *,
    examples: int,
    calls: int,
    phases: Sequence[Phase] = tuple(Phase),
    payloads: str | None = None,
    machine: type[DataflowMachine] = DataflowMachine,
) -> None:
    """Search for calls that servers over this Redis and the model disagree about; raise what tells them apart."""
    plane = Plane(url, folder, payloads=payloads)
    machine = type("Machine", (machine,), {"plane": plane})
    bounds = settings(
        max_examples=examples,
        stateful_step_count=calls,
        phases=phases,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(machine, settings=bounds)
    finally:
        plane.close()

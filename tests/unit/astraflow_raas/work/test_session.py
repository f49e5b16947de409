"""A lease is run member by member, each isolated, and ends answered or with one failure that says why."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow import plugins
from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import trajectory_service_pb2 as outcomes
from astraflow.plugins import (
    Episode,
    Message,
    MissingCapability,
    Policy,
    RewardFailed,
    Score,
    TaskSpec,
    TrajectoryBuilder,
)
from astraflow.recipe import ResolvedRole
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineFaulty, EngineRefused, EngineUnavailable
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.work.session import Failure, Session, SessionSettings
from astraflow_raas.workflows.single_turn import SingleTurn
from support.fake_engine import FakeEngine
from support.raas_parts import (
    LIMITS,
    SAMPLING,
    SOLVER,
    ScriptedWorkflow,
    leased,
    served_policy,
    write_tokenizer,
)
from support.scripted_dataflow import eventually, result


@dataclass
class Setup:
    engine: FakeEngine
    policy: ServedPolicy
    workflow: ScriptedWorkflow
    push: AsyncMock

    def session(self, timeout_s: float = 20, coalesce: int = 128) -> Session:
        bounds = {"episode_timeout_s": timeout_s, "coalesce_max_new_tokens": coalesce}
        settings = SessionSettings(
            node_id="node-1",
            sampling={"solver": SAMPLING},
            roles={"solver": SOLVER},
            row_limits=LIMITS,
            **bounds,
        )
        parts: dict[str, Any] = {"policies": {"solver": self.policy}, "pusher": Mock(push=self.push)}
        return Session(self.workflow, settings=settings, metrics=Metrics(), **parts)

    async def run(self, lease: task_pb2.Lease, timeout_s: float = 20, coalesce: int = 128) -> Failure | None:
        session = self.session(timeout_s, coalesce)
        failure = await session.run(lease)
        assert session.num_running == 0
        return failure

    async def fails(self, lease: task_pb2.Lease, *, timeout_s: float = 20.0) -> Failure:
        """Run a lease that does not succeed."""
        failure = await self.run(lease, timeout_s=timeout_s)
        assert failure is not None
        return failure

    @asynccontextmanager
    async def running(self, lease: task_pb2.Lease) -> "AsyncIterator[asyncio.Task[Failure | None]]":
        """A lease whose calls the engine holds until the end of the block."""
        self.engine.may_answer.clear()
        task = asyncio.create_task(self.run(lease))
        await eventually(lambda: self.engine.requests, what="the episodes call the engine")
        yield task
        self.engine.may_answer.set()

    @property
    def pushed(self) -> list[trajectory_pb2.Episode]:
        return [call.args[0] for call in self.push.mock_calls]

    @property
    def members(self) -> list[int]:
        return sorted(episode.member for episode in self.pushed)


async def length_of(_task: TaskSpec, completion: str, **_given: object) -> Score:
    return Score(float(len(completion)))


async def no_number(_task: TaskSpec, _completion: str, **_given: object) -> Score:
    return Score(math.nan)


async def too_slow(_task: TaskSpec, _completion: str, **_given: object) -> Score:
    raise RewardFailed("it did not return", reason="reward_timeout")


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    engine = FakeEngine()
    policy = await served_policy(tmp_path, engine, version=7)
    push = AsyncMock(return_value=result(outcomes.OUTCOME_ACCEPTED))
    yield Setup(engine, policy, ScriptedWorkflow(SingleTurn(reward=length_of)), push)
    await policy.close()


async def test_every_member_is_pushed_with_prompt_and_completion_as_sampled(setup: Setup) -> None:
    assert await setup.run(leased(members=(0, 2, 5))) is None
    assert setup.members == [0, 2, 5]
    prompt = setup.policy.tokenizer.encode([Message("user", "3 + 4?")])
    for episode in setup.pushed:
        columns = decode_columns(trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body))
        assert tuple(columns.token_ids[: len(prompt)]) == prompt
        assert columns.loss_mask.tolist() == [False] * len(prompt) + [True] * 5
        assert columns.version_spans == ((len(prompt), len(prompt) + 5, 7),)
    assert len({episode.episode_id for episode in setup.pushed}) == 3
    assert setup.policy.num_tokens == 15


async def test_an_episode_ends_before_it_is_pushed(setup: Setup) -> None:
    ended: list[bool] = []
    had_ended: list[int] = []

    def taken(*_: object) -> outcomes.PushResult:
        had_ended.append(len(ended))
        return result(outcomes.OUTCOME_ACCEPTED)

    setup.push.side_effect = taken
    await setup.session().run(leased(members=(0, 1, 2)), member_ended=lambda: ended.append(True))
    assert len(ended) == 3
    assert min(had_ended) >= 1


async def test_a_lease_that_cannot_be_read_is_given_back_for_good(setup: Setup) -> None:
    failure = await setup.fails(leased(data_json=b"["))
    assert (failure.reason, failure.retryable) == ("workflow_error", False)
    assert setup.workflow.runs == 0


async def test_episodes_of_a_task_share_one_engine_request_and_differ_by_seed(setup: Setup) -> None:
    await setup.run(leased(members=(0, 1, 2, 3)))
    (request,) = setup.engine.requests
    assert len({call.seed for call in request}) == 4
    assert len({call.prompt_ids for call in request}) == 1


async def test_calls_longer_than_the_bound_go_alone(setup: Setup) -> None:
    await setup.run(leased(members=(0, 1, 2)), coalesce=SAMPLING.max_new_tokens - 1)
    assert [len(request) for request in setup.engine.requests] == [1, 1, 1]


async def test_a_second_attempt_samples_the_same_tokens(setup: Setup) -> None:
    await setup.run(leased(members=(1,), attempt=1))
    await setup.run(leased(members=(1,), attempt=2))
    bodies = [episode.trajectories[0].body for episode in setup.pushed]
    assert len({trajectory_pb2.Trajectory.FromString(body).token_ids for body in bodies}) == 1


WRONG_ANSWER = ValueError("no such gold answer")
UNABLE = MissingCapability("no sandbox: install bubblewrap")
NONSENSE = plugins.Episode((None,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "members", "reason", "detail"),
    [
        ([WRONG_ANSWER], [1, 2], "workflow_error", f"member 0: ValueError: {WRONG_ANSWER}"),
        ([NONSENSE], [1, 2], "workflow_error", "member 0: "),
        ([WRONG_ANSWER, UNABLE], [2], "missing_capability", f"member 1: {UNABLE}"),
    ],
    ids=["raises", "returns nonsense", "is for another node"],
)
async def test_a_workflow_that_fails_fails_its_own_member_and_no_other(
    setup: Setup, script: list[object], members: list[int], reason: str, detail: str
) -> None:
    setup.workflow.script = dict(enumerate(script))
    failure = await setup.fails(leased(members=(0, 1, 2)))
    assert (setup.members, failure.reason, failure.retryable) == (members, reason, True)
    assert detail in failure.detail


async def test_a_workflow_that_hangs_times_out_alone(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[asyncio.Timeout] = []

    def noted(delay_s: float) -> asyncio.Timeout:
        deadlines.append(asyncio.timeout(delay_s))
        return deadlines[-1]

    monkeypatch.setattr("astraflow_raas.work.session.asyncio", Mock(wraps=asyncio, timeout=noted))
    setup.workflow.script[0] = "hang"
    running = asyncio.create_task(setup.fails(leased(members=(0, 1)), timeout_s=600.0))
    await eventually(lambda: setup.members == [1], what="its neighbour is pushed")
    deadlines[0].reschedule(asyncio.get_running_loop().time())
    assert (await running).reason == "timeout"
    assert setup.members == [1]


async def test_an_engine_that_never_comes_back_is_not_the_workflows_fault(setup: Setup) -> None:
    setup.engine.up = False
    failure = await setup.fails(leased(), timeout_s=0.3)
    assert (failure.reason, failure.retryable) == ("engine_error", True)


async def test_an_episode_without_an_engine_costs_no_attempt(setup: Setup, tmp_path: Path) -> None:
    policy = setup.policy = ServedPolicy("solver", patience_s=0.0)
    await policy.read_tokenizer(write_tokenizer(tmp_path / "weights"))
    policy.engines[0].ready(setup.engine, version=7)
    policy.engines[0].lost()
    failure = await setup.fails(leased(members=(0,)))
    assert (failure.reason, failure.retryable, policy.is_needed) == ("engine_down", True, False)
    assert "policy 'solver' has had no engine" in failure.detail
    unwanted = leased(members=(0,))
    unwanted.uncredited_roles.append("solver")
    await setup.fails(unwanted)
    assert policy.is_needed, "the workflow asks for it whatever it was told"


async def test_a_task_in_whose_calls_engines_are_lost_twice_has_used_an_attempt(
    setup: Setup, tmp_path: Path
) -> None:
    policy = setup.policy = ServedPolicy("solver", patience_s=0.0)
    await policy.read_tokenizer(write_tokenizer(tmp_path / "weights"))
    session = setup.session()
    reasons = []
    for number in range(2):
        setup.engine.may_answer.clear()
        policy.engines[0].ready(setup.engine, version=7)
        running = asyncio.create_task(session.run(leased(members=(0,))))
        await eventually(
            lambda number=number: len(setup.engine.requests) > number, what="the episode calls the engine"
        )
        policy.engines[0].lost()
        setup.engine.up = False
        setup.engine.may_answer.set()
        failure = await running
        assert failure is not None
        reasons.append(failure.reason)
        setup.engine.up = True
    assert reasons == ["engine_down", "engine_error"]


async def test_a_call_lost_with_its_engine_is_made_again_under_the_same_seed(setup: Setup) -> None:
    setup.engine.faults.append(EngineUnavailable("connection reset"))
    assert await setup.run(leased(members=(0,))) is None
    lost, repeated = (request[0] for request in setup.engine.requests)
    assert (lost.seed == repeated.seed, lost.rid == repeated.rid) == (True, False)
    assert setup.members == [0]


@pytest.mark.parametrize(
    ("fault", "meaning"),
    [
        (EngineFaulty("log-probs are missing"), ("engine_error", True)),
        (EngineRefused("prompt too long"), ("workflow_error", False)),
    ],
)
async def test_faults_of_the_engine_keep_their_meaning(
    setup: Setup, fault: Exception, meaning: object
) -> None:
    setup.engine.faults.append(fault)
    failure = await setup.fails(leased(members=(0,)))
    assert (failure.reason, failure.retryable) == meaning


async def test_a_reward_that_is_not_a_number_is_final(setup: Setup) -> None:
    setup.workflow.inner = SingleTurn(reward=no_number)
    failure = await setup.fails(leased(members=(0, 1)))
    assert (setup.pushed, failure.retryable) == ([], False)
    assert "nan_reward" in failure.detail
    assert "1 more" in failure.detail


async def test_a_reward_that_failed_is_named_and_tried_again(setup: Setup) -> None:
    setup.workflow.inner = SingleTurn(reward=too_slow)
    failure = await setup.fails(leased(members=(0,)))
    assert failure == Failure(reason="reward_timeout", detail="member 0: it did not return", retryable=True)


async def test_a_quarantined_push_gives_the_lease_back(setup: Setup) -> None:
    setup.push.return_value = result(outcomes.OUTCOME_POISON, reason="nan_logprob")
    failure = await setup.fails(leased(members=(0,)))
    assert "nan_logprob" in failure.detail
    assert failure.retryable


@pytest.mark.parametrize("name", ["ACCEPTED_LATE", "DUPLICATE", "SUPERSEDED", "FENCED", "LATE_CLOSED"])
async def test_every_other_outcome_ends_the_member(setup: Setup, name: str) -> None:
    setup.push.return_value = result(outcomes.Outcome.Value(f"OUTCOME_{name}"))
    assert await setup.run(leased()) is None


async def test_an_evaluation_of_another_version_is_refused_before_any_token(setup: Setup) -> None:
    failure = await setup.fails(leased(required_versions={"solver": 6}))
    assert failure.reason == "version_unavailable"
    assert "serves version 7" in failure.detail
    assert setup.engine.requests == []


async def test_an_evaluation_pins_its_version_until_its_episodes_are_done(setup: Setup) -> None:
    async with setup.running(leased(required_versions={"solver": 7})) as running:
        assert not await setup.policy.wait_unpinned(deadline_s=0.05)
    assert await running is None
    assert await setup.policy.wait_unpinned(deadline_s=5.0)


async def test_an_evaluation_whose_version_moved_under_it_is_not_pushed(setup: Setup) -> None:
    async with setup.running(leased(members=(0,), required_versions={"solver": 7})) as running:
        await setup.engine.swap(model_dir=Path("v8"), version=8)
    failure = await running
    assert failure is not None
    assert (failure.reason, setup.pushed) == ("version_unavailable", [])


async def test_a_training_episode_that_met_a_swap_carries_both_versions(setup: Setup) -> None:
    async with setup.running(leased(members=(0,))) as running:
        await setup.engine.swap(model_dir=Path("v8"), version=8)
    assert await running is None
    header = setup.pushed[0].trajectories[0].header
    assert (header.min_version, header.max_version) == (7, 8)


async def test_a_cancelled_lease_stops_its_calls_in_the_engine(setup: Setup) -> None:
    async with setup.running(leased(members=(0, 1))) as running:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: len(setup.engine.aborted) == 2, what="both calls are aborted")
    assert setup.pushed == []


class _TwoSeats:
    """The first seat speaks, then the second; whoever is trained has a trajectory."""

    def __init__(self) -> None:
        self.first: list[str] = []

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        self.first.append(policies["first"].name)
        said = []
        for seat in ("first", "second"):
            builder = TrajectoryBuilder(policies[seat])
            builder.add_prompt(task.messages)
            await builder.generate()
            said += [builder.build(reward=1.0)] if policies[seat].wants_trajectory else []
        return Episode(tuple(said), {"win": 1.0})


async def test_seats_change_in_every_other_episode_and_the_draw_that_was_met_is_told(setup: Setup) -> None:
    """The trained role stays one role, so its group holds both seats."""
    settings = SessionSettings(
        node_id="node-1",
        episode_timeout_s=20,
        coalesce_max_new_tokens=128,
        sampling={"solver": SAMPLING, "rival": SAMPLING},
        row_limits=LIMITS,
        roles={
            "first": ResolvedRole("first", "solver", is_trained=True),
            "second": ResolvedRole("second", "rival", is_trained=False),
        },
        snapshots={"rival"},
        swap_seats=("first", "second"),
    )
    workflow = _TwoSeats()
    parts: dict[str, Any] = {"pusher": Mock(push=setup.push), "metrics": Metrics()}
    policies = {"solver": setup.policy, "rival": setup.policy}
    assert await Session(workflow, settings=settings, policies=policies, **parts).run(leased()) is None
    assert sorted(workflow.first) == ["rival", "solver"]
    for episode in setup.pushed:
        (item,) = episode.trajectories
        assert (item.header.policy_id, item.header.role) == ("solver", "first")
        assert dict(episode.draws) == {"rival": 7}

"""What leaves the node as an episode passes the server's validators; what would not is refused by name."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow import plugins
from astraflow.columns import decode_columns
from astraflow.plugins import TurnSpan, VersionSpan
from astraflow.recipe import ResolvedRole, RowLimits
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_raas.work.episode import EpisodeIds, VersionMoved, build_episode
from support.raas_parts import LIMITS, SAMPLING, SOLVER, leased

IDS = EpisodeIds(episode_id="episode-1", node_id="node-1", member=3)
GOOD = plugins.Trajectory(
    policy="solver",
    token_ids=(5, 6, 7, 8),
    loss_mask=(False, False, True, True),
    logprobs=(0.0, 0.0, -0.5, -1.25),
    version_spans=(VersionSpan(2, 4, 9),),
    reward=1.0,
    finish_reason="stop",
    metrics={"length": 2.0},
)
COVERING = {"version_spans": (VersionSpan(0, 4, 9),)}
FIRST_TOKEN_TRAINED = {
    "loss_mask": (True, False, True, True),
    "logprobs": (-1.0, 0.0, -1.0, -1.0),
    **COVERING,
}


def build(*trajectories: plugins.Trajectory, **lease: Any) -> trajectory_pb2.Episode:
    episode = plugins.Episode(trajectories, {"turns": 1.0})
    return build_episode(episode, lease=leased(**lease), ids=IDS, roles={"solver": SOLVER}, row_limits=LIMITS)


@pytest.mark.parametrize(
    ("limits", "slug"),
    [
        (RowLimits(4, 9), ""),
        (RowLimits(3, 9), "too_long_to_train"),
        (RowLimits(4, 8), "token_unknown"),
    ],
)
def test_what_no_trainer_can_train_on_is_refused_but_evaluated(limits: RowLimits, slug: str) -> None:
    """Four tokens, of which the largest id is 8."""
    episode, parts = plugins.Episode((GOOD,)), {"ids": IDS, "roles": {"solver": SOLVER}}
    judged: dict[str, Any] = {**parts, "row_limits": {"solver": limits}}
    if slug:
        with pytest.raises(BadTrajectory, match=slug):
            build_episode(episode, lease=leased(), **judged)
    else:
        build_episode(episode, lease=leased(), **judged)
    build_episode(episode, lease=leased(required_versions={"solver": 9}), **judged)


@pytest.mark.parametrize(
    ("named", "expected"),
    [("plan", "plan"), ("work", "work"), ("judge", None), ("", BadTrajectory), ("stranger", BadTrajectory)],
)
def test_a_trajectory_is_of_a_role_of_its_policy_and_pushed_when_the_role_is_trained(
    named: str, expected: str | type[BadTrajectory] | None
) -> None:
    names = ("plan", "work", "judge")
    roles = {name: ResolvedRole(name, "solver", is_trained=name != "judge") for name in names}
    episode = plugins.Episode((replace(GOOD, role=named),))
    if expected is BadTrajectory:
        with pytest.raises(BadTrajectory, match="unknown_role"):
            build_episode(episode, lease=leased(), ids=IDS, roles=roles, row_limits=LIMITS)
        return
    message = build_episode(episode, lease=leased(), ids=IDS, roles=roles, row_limits=LIMITS)
    assert [item.header.role for item in message.trajectories] == [expected] * (expected is not None)
    assert f"{named}.length" in message.metrics


def test_a_workflow_s_own_name_for_the_only_role_becomes_the_run_s() -> None:
    for named in ("", "player", "solver"):
        episode = plugins.Episode((replace(GOOD, role=named),))
        message = build_episode(episode, lease=leased(), ids=IDS, roles={"player": SOLVER}, row_limits=LIMITS)
        assert [item.header.role for item in message.trajectories] == ["solver"]


def test_a_finished_episode_carries_its_ids_header_and_exact_columns() -> None:
    message = build(GOOD, attempt=2)
    assert (message.run_id, message.task_id, message.member, message.attempt) == ("run-1", "task-1", 3, 2)
    assert message.status == trajectory_pb2.EPISODE_STATUS_FINISHED
    (item,) = message.trajectories
    assert item.header.trajectory_id == "episode-1-0"
    assert (item.header.num_tokens, item.header.num_trainable_tokens) == (4, 2)
    assert (item.header.min_version, item.header.max_version) == (9, 9)
    body = trajectory_pb2.Trajectory.FromString(item.body)
    assert body.sampling == SAMPLING, "what its log-probs refer to"
    assert decode_columns(body).version_spans == ((2, 4, 9),)


def test_episodes_of_a_second_copy_say_so() -> None:
    assert build(GOOD, hedge=True).hedge
    assert not build(GOOD).hedge


def test_versions_in_the_header_come_from_spans_that_hold_a_trainable_token() -> None:
    spans = (VersionSpan(0, 2, 1), VersionSpan(2, 3, 4), VersionSpan(3, 4, 5))
    header = build(replace(GOOD, version_spans=spans)).trajectories[0].header
    assert (header.min_version, header.max_version) == (4, 5)


def test_a_span_says_that_its_prefix_was_computed_anew() -> None:
    spans = (VersionSpan(2, 3, 8), VersionSpan(3, 4, 9, recomputed=True))
    message = build(replace(GOOD, version_spans=spans)).trajectories[0]
    sent = trajectory_pb2.Trajectory.FromString(message.body).version_spans
    assert [span.recomputed for span in sent] == [False, True]


def test_metrics_of_a_trajectory_are_named_after_its_policy_and_unusable_ones_are_left_out() -> None:
    broken = replace(GOOD, metrics={"length": 2.0, "speed": math.nan, "far": -1e160})
    assert dict(build(broken).metrics) == {"turns": 1.0, "solver.length": 2.0}
    assert dict(build().metrics) == {"turns": 1.0}, "an episode without trajectories is one"


@pytest.mark.parametrize(
    ("change", "slug"),
    [
        ({"reward": math.nan}, "nan_reward"),
        ({"reward": -1.7e308}, "reward_range"),
        ({"turn_spans": (TurnSpan(0, 2, "user", 1e160),)}, "reward_range"),
        ({"policy": "critic"}, "unknown_policy"),
        ({"logprobs": (0.0, 0.0, -0.5)}, "length_mismatch"),
        ({"token_ids": (), "loss_mask": (), "logprobs": ()}, "empty"),
        ({"loss_mask": (False,) * 4, "logprobs": (0.0,) * 4}, "no_trainable_tokens"),
        ({"token_ids": (5, 6, 2**31, 8)}, "token_out_of_range"),
        ({"logprobs": (0.0, 0.0, math.nan, -1.0)}, "nan_logprob"),
        ({"version_spans": ()}, "spans_not_covering"),
        ({"version_spans": (VersionSpan(2, 5, 9),)}, "bad_spans"),
        (FIRST_TOKEN_TRAINED, "first_token_trained"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_rule(change: dict[str, object], slug: str) -> None:
    with pytest.raises(BadTrajectory) as refused:
        build(replace(GOOD, **change))  # type: ignore[arg-type]
    assert refused.value.slug == slug


def test_more_than_64_trajectories_are_refused() -> None:
    with pytest.raises(BadTrajectory, match="65 trajectories"):
        build(*[GOOD] * 65)


def test_an_episode_larger_than_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = build(GOOD, GOOD).ByteSize()
    monkeypatch.setattr("astraflow_raas.work.episode.MAX_EPISODE_BYTES", size)
    assert build(GOOD, GOOD).trajectories
    with pytest.raises(BadTrajectory, match=rf"too_large: \d+ bytes, the limit is {size} per episode"):
        build(GOOD, GOOD, GOOD)


def test_an_evaluation_must_hold_exactly_the_required_version() -> None:
    assert build(GOOD, required_versions={"solver": 9}).trajectories
    with pytest.raises(VersionMoved, match="required 8"):
        build(GOOD, required_versions={"solver": 8})


ROWS = st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(-50, 0))


@given(st.lists(ROWS, min_size=2, max_size=200))
def test_any_well_formed_trajectory_survives_the_wire(rows: list[tuple[int, bool, float]]) -> None:
    token_ids, _, logprobs = zip(*rows, strict=True)
    loss_mask = [False, True, *(chosen for _, chosen, _ in rows[2:])]
    trajectory = replace(
        GOOD,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=[logprob * chosen for logprob, chosen in zip(logprobs, loss_mask, strict=True)],
        version_spans=[VersionSpan(0, len(rows), 3)],
    )
    item = build(trajectory).trajectories[0]
    columns = decode_columns(trajectory_pb2.Trajectory.FromString(item.body))
    assert columns.token_ids.tolist() == list(trajectory.token_ids)
    assert columns.loss_mask.tolist() == list(trajectory.loss_mask)
    assert np.array_equal(columns.logprobs, np.asarray(trajectory.logprobs, dtype=np.float32))
    assert item.header.num_trainable_tokens == sum(trajectory.loss_mask)

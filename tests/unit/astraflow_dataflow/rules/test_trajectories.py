"""The wall in front of training: every class of poison, by name, and nothing good refused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.blobs import blob_prefix, blob_ref
from astraflow.columns import Columns, encode_columns
from astraflow.recipe import RowLimits
from astraflow.recipe.dataflow import DEFAULT_MAX_ABS_REWARD as MAX_ABS_REWARD
from astraflow.rollout.v1 import blob_pb2, trajectory_pb2
from astraflow.trajectories import REASONS, BadTrajectory
from astraflow_dataflow.rules.trajectories import Expectation, check_episode, unknown_version
from support.dataflow_world import make_episode, make_trajectory

PREFIX = blob_prefix("s3://bucket", "run")
KNOWN = Expectation(newest_versions={"solver": 3}, roles={"solver": "solver"}, blob_prefix=PREFIX)


@dataclass
class Parts:
    """What is spoiled of an episode: itself, and its first trajectory's header and body."""

    whole: trajectory_pb2.Episode
    head: trajectory_pb2.TrajectoryHeader
    body: trajectory_pb2.Trajectory


Spoil = Callable[[Parts], object]


def good() -> trajectory_pb2.Episode:
    """An episode of one trajectory of 13 tokens, the last 5 of them trainable."""
    episode = make_episode(run_id="run", task_id="t", member=0)
    episode.trajectories[0].CopyFrom(make_trajectory("x", num_prompt=8, num_response=5, version=2))
    return episode


def refusal(episode: trajectory_pb2.Episode, expectation: Expectation) -> str:
    """The slug of the rule that an episode breaks; empty when it is good."""
    try:
        check_episode(episode, expectation)
    except BadTrajectory as error:
        return error.slug
    return ""


def spoiled(*spoils: Spoil) -> trajectory_pb2.Episode:
    """The good episode with something wrong."""
    episode = good()
    body = trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body)
    for spoil in spoils:
        spoil(Parts(episode, episode.trajectories[0].header, body))
    if episode.trajectories and episode.trajectories[0].body:
        episode.trajectories[0].body = body.SerializeToString()
    return episode


def logprob(position: int, value: float) -> Spoil:
    """Overwrite one log-prob."""

    def spoil(parts: Parts) -> None:
        column = np.frombuffer(parts.body.logprobs, "<f4").copy()
        column[position] = value
        parts.body.logprobs = column.tobytes()

    return spoil


def header(**values: object) -> Spoil:
    """Overwrite header fields."""

    changed = trajectory_pb2.TrajectoryHeader(**values)  # type: ignore[arg-type]
    return lambda parts: parts.head.MergeFrom(changed)


def body(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    """Change one bytes column."""

    return lambda parts: setattr(parts.body, name, change(getattr(parts.body, name)))


def listed(name: str, kind: Callable[..., Any], rows: Iterable[tuple[Any, ...]], *fields: str) -> Spoil:
    """Replace a list of messages of the body."""

    def spoil(parts: Parts) -> None:
        del getattr(parts.body, name)[:]
        getattr(parts.body, name).extend(kind(**dict(zip(fields, row, strict=True))) for row in rows)

    return spoil


def spans(*given: tuple[int, int, int]) -> Spoil:
    """Replace the version spans."""
    return listed("version_spans", trajectory_pb2.VersionSpan, given, "start", "end", "version")


def turns(*given: tuple[int, int]) -> Spoil:
    """Replace the turn spans."""
    return listed("turn_spans", trajectory_pb2.TurnSpan, given, "start", "end")


def a_blob(prefix: str = PREFIX, **values: object) -> blob_pb2.BlobRef:
    """A good reference under `prefix`, with some fields overwritten."""
    ref = blob_ref(b"bytes", name="image-1", prefix=prefix, media_type="image/png")
    for name, value in values.items():
        setattr(ref, name, value)
    return ref


def media(*given: tuple[int, int], ref: blob_pb2.BlobRef | None = None, times: int = 1) -> Spoil:
    """Replace the media spans."""
    rows = [(start, end, ref or a_blob()) for start, end in given * times]
    return listed("media", trajectory_pb2.MediaSpan, rows, "start", "end", "blob")


def routing(ref: blob_pb2.BlobRef) -> Spoil:
    """Add expert routing."""

    return lambda parts: parts.body.expert_routing.CopyFrom(ref)


def episode(**values: object) -> Spoil:
    """Overwrite episode fields."""

    def spoil(parts: Parts) -> None:
        for name, value in values.items():
            setattr(parts.whole, name, value)

    return spoil


def token(value: int) -> Spoil:
    """Overwrite the first token id."""
    return body("token_ids", lambda raw: np.int32(value).tobytes() + raw[4:])


def empty(parts: Parts) -> None:
    for name in ("token_ids", "logprobs", "loss_mask"):
        parts.body.ClearField(name)  # type: ignore[arg-type]
    parts.head.num_tokens = 0


def too_long(parts: Parts) -> None:
    parts.body.token_ids = b"\0" * 4 * (1_048_576 + 1)
    parts.head.num_tokens = 1_048_577


def nothing_trainable(parts: Parts) -> None:
    parts.body.loss_mask = b"\0\0"
    parts.body.logprobs = b"\0" * 52
    parts.head.num_trainable_tokens = 0


def twice(parts: Parts) -> None:
    parts.whole.trajectories.add().CopyFrom(parts.whole.trajectories[0])


def too_many(parts: Parts) -> None:
    parts.whole.trajectories.extend(make_trajectory(f"more-{number}") for number in range(64))


def too_many_draws(parts: Parts) -> None:
    parts.whole.draws.update(dict.fromkeys(map(str, range(65)), 0))


def metrics(*values: float) -> Spoil:
    """Add metrics of the episode."""
    return lambda parts: parts.whole.metrics.update({f"m{n}": value for n, value in enumerate(values)})


NAN, INF = float("nan"), float("inf")


def metric_of_a_trajectory(value: float) -> Spoil:
    """Add a metric of the trajectory."""
    return header(metrics={"length": value})


def reward_of_a_turn(value: float) -> Spoil:
    """Add a turn that earned something."""
    return listed("turn_spans", trajectory_pb2.TurnSpan, [(0, 5, value)], "start", "end", "reward")


OF_A_NUMBER: dict[str, Callable[[float], Spoil]] = {
    "a reward": lambda value: header(reward=value),
    "a reward of a turn": reward_of_a_turn,
    "a metric": metrics,
    "a metric of a trajectory": metric_of_a_trajectory,
}
"""Each number that others sum."""


def temperature(value: float) -> Spoil:
    """Overwrite the temperature."""
    return lambda parts: setattr(parts.body.sampling, "temperature", value)


def first_token_trained(parts: Parts) -> None:
    mask = bytearray(parts.body.loss_mask)
    mask[0] |= 1
    parts.body.loss_mask = bytes(mask)
    parts.body.version_spans.insert(0, trajectory_pb2.VersionSpan(start=0, end=1, version=2))
    parts.head.num_trainable_tokens += 1


POISON: list[tuple[str, Spoil, str]] = [
    ("nan in a trainable log-prob", logprob(9, NAN), "nan_logprob"),
    ("nan in a prompt log-prob", logprob(0, NAN), "nan_logprob"),
    ("minus infinity", logprob(9, -INF), "inf_logprob"),
    ("plus infinity", logprob(9, INF), "inf_logprob"),
    ("a positive log-prob", logprob(9, 0.25), "positive_logprob"),
    ("the smallest positive log-prob", logprob(9, 1e-45), "positive_logprob"),
    ("a log-prob outside the mask", logprob(0, -0.5), "logprob_outside_mask"),
    ("greedy samples", temperature(0.0), "bad_temperature"),
    ("a negative temperature", temperature(-1.0), "bad_temperature"),
    ("nan temperature", temperature(NAN), "bad_temperature"),
    ("an infinite temperature", temperature(INF), "bad_temperature"),
    ("a first token that is trained", first_token_trained, "first_token_trained"),
    ("nan reward", header(reward=NAN), "nan_reward"),
    ("infinite reward", header(reward=-INF), "nan_reward"),
    *(
        (f"{what} of {value}", spoil(value), "reward_range")
        for what, spoil in OF_A_NUMBER.items()
        for value in (MAX_ABS_REWARD * (1 + 1e-15), -1e160, 1.7e308)
    ),
    ("header counts more tokens", header(num_tokens=14), "length_mismatch"),
    ("header counts more trainable tokens", header(num_trainable_tokens=6), "mask_mismatch"),
    ("header claims a newer version", header(max_version=3), "version_mismatch"),
    ("header claims an older version", header(min_version=1), "version_mismatch"),
    ("a version that cannot exist", header(max_version=400), "future_version"),
    ("a policy the run has not", header(policy_id="stranger"), "unknown_policy"),
    ("another id in the body", header(trajectory_id="y"), "id_mismatch"),
    ("an id with a line break", header(trajectory_id="x\ny"), "bad_id"),
    ("an id too long", header(trajectory_id="x" * 129), "bad_id"),
    ("a role with a space", header(role="a b"), "bad_role"),
    ("torn token ids", body("token_ids", lambda raw: raw[:-1]), "length_mismatch"),
    ("one token less", body("token_ids", lambda raw: raw[:-4]), "length_mismatch"),
    ("one log-prob less", body("logprobs", lambda raw: raw[:-4]), "length_mismatch"),
    ("no log-probs", body("logprobs", lambda raw: b""), "length_mismatch"),
    ("a short mask", body("loss_mask", lambda raw: raw[:-1]), "length_mismatch"),
    ("a long mask", body("loss_mask", lambda raw: raw + b"\0"), "length_mismatch"),
    ("padding bits set", body("loss_mask", lambda raw: raw[:-1] + bytes([raw[-1] | 0x80])), "mask_padding"),
    ("a mask bit less", body("loss_mask", lambda raw: raw[:-1] + bytes([raw[-1] & ~1])), "mask_mismatch"),
    ("nothing trainable", nothing_trainable, "no_trainable_tokens"),
    ("a negative token id", token(-1), "token_out_of_range"),
    ("no tokens", empty, "empty"),
    ("too many tokens", too_long, "too_long"),
    ("a body too large", body("token_ids", lambda raw: bytes(32 * 2**20 + 1)), "too_large"),
    ("no version spans", spans(), "spans_not_covering"),
    ("spans that end early", spans((8, 12, 2)), "spans_not_covering"),
    ("spans that begin late", spans((9, 13, 2)), "spans_not_covering"),
    ("overlapping spans", spans((8, 12, 2), (11, 13, 2)), "bad_spans"),
    ("spans in the wrong order", spans((10, 13, 2), (8, 10, 2)), "bad_spans"),
    ("an empty span", spans((8, 8, 2), (8, 13, 2)), "bad_spans"),
    ("a span beyond the end", spans((8, 14, 2)), "bad_spans"),
    ("a span of another version", spans((8, 10, 1), (10, 13, 2)), "version_mismatch"),
    ("turns that overlap", turns((0, 5), (4, 8)), "bad_spans"),
    ("a turn beyond the end", turns((0, 14)), "bad_spans"),
    ("media that overlap", media((0, 5), (4, 8)), "bad_spans"),
    ("media beyond the end", media((0, 14)), "bad_spans"),
    ("too many media", media((0, 5), times=257), "too_many_media"),
    ("an image of another run", media((0, 5), ref=a_blob(blob_prefix("s3://bucket", "other"))), "bad_blob"),
    ("an image without a digest", media((0, 5), ref=a_blob(sha256=b"")), "bad_blob"),
    ("routing of another store", routing(a_blob(blob_prefix("s3://else", "run"))), "bad_blob"),
    ("an episode without an id", episode(episode_id=""), "bad_id"),
    ("an episode that never ended", episode(status=0), "bad_status"),
    ("an unknown status", episode(status=9), "bad_status"),
    ("a failed episode with trajectories", episode(status=2), "failed_with_trajectories"),
    ("one trajectory twice", twice, "duplicate_id"),
    ("too many trajectories", too_many, "too_many_trajectories"),
    ("too many draws", too_many_draws, "too_many_draws"),
    ("too many metrics", metrics(*[1.0] * 65), "bad_metrics"),
    ("a metric that is infinite", metrics(INF), "bad_metrics"),
]


def test_a_good_episode_passes() -> None:
    assert refusal(good(), KNOWN) == ""


def test_an_episode_may_refer_to_blobs_of_its_run() -> None:
    with_media = spoiled(media((0, 5), (5, 8)))
    assert refusal(with_media, KNOWN) == ""
    assert refusal(spoiled(routing(a_blob())), KNOWN) == ""
    assert trajectory_pb2.Trajectory.FromString(with_media.trajectories[0].body).media[1].blob.num_bytes == 5


@pytest.mark.parametrize(("spoil", "reason"), [row[1:] for row in POISON], ids=[row[0] for row in POISON])
def test_each_kind_of_poison_is_named(spoil: Spoil, reason: str) -> None:
    assert refusal(spoiled(spoil), KNOWN) == reason
    assert reason in REASONS


@pytest.mark.parametrize("spoil", OF_A_NUMBER.values(), ids=OF_A_NUMBER)
@pytest.mark.parametrize("most", [1.0, MAX_ABS_REWARD, 1e9])
def test_a_number_up_to_the_recipe_s_bound_passes_and_the_refusal_names_value_and_setting(
    spoil: Callable[[float], Spoil], most: float
) -> None:
    known = replace(KNOWN, max_abs_reward=most)
    assert refusal(spoiled(spoil(most)), known) == refusal(spoiled(spoil(-most)), known) == ""
    with pytest.raises(BadTrajectory, match=r"-\d.*dataflow\.max_abs_reward allows.*raise that setting"):
        check_episode(spoiled(spoil(-2 * most)), known)


def test_a_body_that_is_no_message_is_named() -> None:
    episode = good()
    episode.trajectories[0].body = b"\xff\xff\xff"
    assert refusal(episode, KNOWN) == "bad_body"


@pytest.mark.parametrize(
    "spoils",
    [
        pytest.param([spans((0, 8, 1), (8, 13, 2))], id="a span over prompt tokens may hold any version"),
        pytest.param([logprob(9, 0.0)], id="a log-prob of zero is a certain token"),
        pytest.param([logprob(9, -0.0)], id="a log-prob of minus zero is a certain token"),
        pytest.param(
            [spans((8, 10, 1), (10, 13, 2)), header(min_version=1)], id="versions as the header says"
        ),
    ],
)
def test_what_looks_odd_and_is_good_passes(spoils: list[Spoil]) -> None:
    assert refusal(spoiled(*spoils), KNOWN) == ""


@pytest.mark.parametrize(("bits", "slug"), [(0xBF00, ""), (0x3F00, "positive_logprob")], ids=["-0.5", "0.5"])
def test_bfloat16_log_probs_are_read_and_checked(bits: int, slug: str) -> None:
    def spoil(parts: Parts) -> None:
        parts.body.logprobs = bytes(16) + bits.to_bytes(2, "little") * 5
        parts.body.logprob_dtype = trajectory_pb2.LOGPROB_DTYPE_BF16

    assert refusal(spoiled(spoil), KNOWN) == slug


@pytest.mark.parametrize(
    ("limits", "slug"),
    [
        (RowLimits(13, 100), ""),
        (RowLimits(13, None), ""),
        (RowLimits(12, 100), "too_long_to_train"),
        (RowLimits(13, 99), "token_unknown"),
    ],
)
def test_what_no_trainer_can_train_on_is_poison_but_evaluated(limits: RowLimits, slug: str) -> None:
    episode = spoiled(token(99))
    known = replace(KNOWN, row_limits={"solver": limits})
    assert refusal(episode, known) == slug
    assert refusal(episode, replace(known, demand={"solver": 2})) == ""


def test_an_evaluation_may_be_greedy() -> None:
    demand = {"solver": 2}
    assert refusal(spoiled(temperature(0.0)), replace(KNOWN, demand=demand)) == ""


@pytest.mark.parametrize(
    ("policy", "version", "slug"), [("solver", 2, ""), ("solver", 3, "wrong_version"), ("verifier", 9, "")]
)
def test_an_evaluation_demands_its_version_of_its_policy_only(policy: str, version: int, slug: str) -> None:
    demand = {policy: version}
    known = replace(KNOWN, newest_versions={"solver": 3, "verifier": 9}, demand=demand)
    assert refusal(good(), known) == slug


@pytest.mark.parametrize(("newest", "may_come"), [(3, False), (2, False), (1, True), (-1, True)])
def test_a_version_that_may_be_announced_any_moment_is_not_poison(newest: int, may_come: bool) -> None:
    assert (unknown_version(good(), newest_versions={"solver": newest}) is not None) is may_come


@given(st.binary(max_size=400))
def test_no_body_makes_the_wall_crash(raw: bytes) -> None:
    episode = good()
    episode.trajectories[0].body = raw
    assert refusal(episode, KNOWN)


@given(st.integers(0, 10_000), st.data())
def test_a_flipped_bit_in_the_body_never_changes_what_is_accounted(where: int, data: st.DataObject) -> None:
    episode = good()
    raw = bytearray(episode.trajectories[0].body)
    raw[where % len(raw)] ^= 1 << data.draw(st.integers(0, 7))
    episode.trajectories[0].body = bytes(raw)
    if refusal(episode, KNOWN) == "":
        head, body = episode.trajectories[0].header, trajectory_pb2.Trajectory.FromString(bytes(raw))
        assert len(body.token_ids) == 4 * head.num_tokens
        assert sum(bit.bit_count() for bit in body.loss_mask) == head.num_trainable_tokens


@given(st.integers(2, 300), st.data())
def test_every_well_formed_trajectory_passes(num_tokens: int, data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)))
    mask[0] = False
    mask[data.draw(st.integers(1, num_tokens - 1))] = True
    cut = data.draw(st.integers(0, num_tokens))
    given_spans = [span for span in ((0, cut, 1), (cut, num_tokens, 2)) if span[1] > span[0]]
    columns = Columns(
        token_ids=np.full(num_tokens, 2**31 - 1, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.5, 0).astype(np.float32),
        version_spans=tuple(given_spans),
    )
    used = [version for start, end, version in given_spans if mask[start:end].any()]
    episode = make_episode(run_id="run", task_id="t", member=0)
    item = episode.trajectories[0]
    message = encode_columns(columns, trajectory_id=item.header.trajectory_id)
    message.sampling.temperature = 0.5
    item.body = message.SerializeToString()
    item.header.num_tokens, item.header.num_trainable_tokens = num_tokens, int(mask.sum())
    item.header.min_version, item.header.max_version = min(used), max(used)
    assert refusal(episode, KNOWN) == ""

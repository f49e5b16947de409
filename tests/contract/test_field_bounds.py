"""The bounds that the contracts state are those that servers enforce: values just inside are taken, those just outside
are refused, or cut where the contract says so. Every field is tried without a server in test_bounds.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from astraflow._contract.rpcs import bounds_of
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import evaluation_service_pb2 as evaluations
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import AstraflowError, DeadlineError
from astraflow.options.v1 import options_pb2
from astraflow.recipe.file import CodeFile, bundle_digest
from astraflow.rollout.v1 import blob_pb2, engine_load_pb2, task_pb2, trajectory_pb2
from support.any_rpc import answer, request_of
from support.dataflow_world import World, make_episode, make_trajectory, recipe_text

pytestmark = pytest.mark.slow

SHA = b"." * 32
BLOBS = "file:///nowhere/run/blobs/"
RECIPE = recipe_text(name="run")
REFUSED = {"INVALID_ARGUMENT", "INVALID_RECIPE"}

LOAD = engine_load_pb2.EngineLoad(policy_id="solver", slots=1)
HUNG = engine_load_pb2.EngineFault(policy_id="solver", engine=1, reason="engine_hung")


@dataclass(frozen=True)
class Row:
    """A bounded field in a request that is otherwise good."""

    request: Message
    path: str
    """From the request, or the body, to the field; a repeated message on the way has one element."""
    inside: Sequence[Any] = ()
    """Values to send, where they cannot be made from the bounds."""
    outside: Sequence[Any] = ()
    element: Callable[[int], Any] = str
    """Elements of a repeated field or keys of a map."""
    mend: Callable[[Any], Message] = field(default=lambda request: request)
    """Makes the rest of the request fit the value."""
    slugs: tuple[str, ...] = ()
    """How the field is refused when it is by the outcome POISON."""

    def place(self) -> tuple[Descriptor, FieldDescriptor]:
        """The message that has the field, and the field."""
        *way, last = self.path.split(".")
        message: Any = self.request.DESCRIPTOR
        for name in way:
            message = message.fields_by_name[name].message_type
        return message, message.fields_by_name[last]

    def with_value(self, value: object) -> Message:
        """The request with this value in the field."""
        request: Any = type(self.request)()
        request.CopyFrom(self.request)
        *way, last = self.path.split(".")
        at = request
        for name in way:
            at = getattr(at, name)
            at = at if isinstance(at, Message) else at[0]
        put(at, last, value)
        return self.mend(request)


def put(message: Any, name: str, value: object) -> None:
    held = getattr(message, name)
    if isinstance(held, Duration):
        held.FromMilliseconds(int(value * 1000))  # type: ignore[arg-type]
    elif isinstance(value, dict | list):
        message.ClearField(name)
        held = getattr(message, name)
        held.update(value) if isinstance(value, dict) else held.extend(value)
    else:
        setattr(message, name, value)


Values = tuple[list[Any], list[Any]]


def values(row: Row) -> Values:
    """Values just inside and just outside the bounds of the row's field."""
    described = row.place()[1]
    bounds = described.GetOptions().Extensions[options_pb2.bounds]
    made = [([*row.inside], [*row.outside]), _items(bounds, described, row.element)]
    if not row.inside:
        made += [_numbers(bounds, described), _texts(bounds, described)]
    insides, outsides = zip(*made, strict=True)
    return [*chain.from_iterable(insides)], [*chain.from_iterable(outsides)]


def _items(bounds: Any, described: FieldDescriptor, element: Callable[[int], Any]) -> Values:
    is_map = described.message_type is not None and described.message_type.GetOptions().map_entry

    def some(count: int) -> Any:
        found = [element(index) for index in range(count)]
        return dict.fromkeys(found, 1) if is_map else found

    least, most = bounds.min_items, bounds.max_items
    inside = [some(count) for count in (least, most) if count]
    return inside, [some(most + 1)] * bool(most) + [some(least - 1)] * bool(least)


def _numbers(bounds: Any, described: FieldDescriptor) -> Values:
    fractional = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_MESSAGE)
    exact, step = (float, 0.001) if described.cpp_type in fractional else (int, 1)
    inside = [exact(getattr(bounds, name)) for name in ("min", "max") if bounds.HasField(name)]
    outside = [exact(bounds.max) + step] * bounds.HasField("max")
    return inside, outside + [exact(bounds.min) - step] * bounds.HasField("min")


def _texts(bounds: Any, described: FieldDescriptor) -> Values:
    letter: Any = b"x" if described.type == FieldDescriptor.TYPE_BYTES else "x"
    lengths = [(bounds.min_len, bounds.max_len), (bounds.min_bytes, bounds.max_bytes)]
    inside = [letter * length for pair in lengths for length in pair if length]
    outside = [letter * (most + 1) for _, most in lengths if most]
    return inside, outside + [letter * (least - 1) for least, _ in lengths if least]


def created(request: runs.CreateRunRequest) -> Message:
    code = request.run.code
    code.sha256 = bundle_digest([CodeFile(file.path, file.content) for file in code.files])
    return request


def create(**fields: Any) -> Message:
    run = {"run_id": "other", "recipe_yaml": RECIPE, "store_uri": "file:///nowhere"} | fields
    return runs.CreateRunRequest(run=run_pb2.Run(**run))


def submit() -> Message:
    message = task_pb2.Message(role="user", tool_calls=[task_pb2.ToolCall()])
    return tasks.SubmitTasksRequest(run_id="run", tasks=[task_pb2.Task(task_id="t", messages=[message])])


def push() -> trajectories.PushEpisodeRequest:
    return trajectories.PushEpisodeRequest(episode=make_episode(run_id="run", task_id="t1", member=0))


def body() -> trajectory_pb2.Trajectory:
    """A good trajectory, with a picture."""
    found = trajectory_pb2.Trajectory.FromString(make_trajectory("e.solver").body)
    picture = blob_pb2.BlobRef(uri=f"{BLOBS}a", sha256=SHA, num_bytes=1, media_type="image/png")
    found.media.add(start=0, end=1, blob=picture)
    return found


def pushed(trajectory: trajectory_pb2.Trajectory) -> Message:
    request = push()
    if not trajectory.token_ids:
        trajectory.logprobs = trajectory.loss_mask = b""
    request.episode.trajectories[0].CopyFrom(make_trajectory("e.solver"))
    request.episode.trajectories[0].body = trajectory.SerializeToString()
    request.episode.trajectories[0].header.num_tokens = len(trajectory.token_ids) // 4
    return request


def publish() -> Message:
    version = version_pb2.Version(policy_id="solver", manifest_sha256=SHA, trainer_epoch=1)
    return versions.PublishRequest(run_id="run", trainer_epoch=1, version=version)


def of_a_later_step(request: versions.PublishRequest) -> Message:
    request.version.step = min(1, request.version.version)
    return request


def media(index: int) -> Message:
    return trajectory_pb2.MediaSpan(start=index, end=index + 1)


def work(**kind: Any) -> Message:
    return tasks.WorkRequest(**kind)


def json_of(size: int) -> bytes:
    return b'{"a":"' + b"x" * (size - 8) + b'"}'


ONE_FILE = run_pb2.CodeBundle(files=[run_pb2.CodeFile()])
FAULT = version_pb2.WeightFault(policy_id="solver", version=1, problem="wrong")
KIB64 = bounds_of(task_pb2.Task, "data_json").max_bytes
MOST_IDS = bounds_of(trajectory_pb2.Trajectory, "token_ids").max_bytes
TOKENS = [b"\0" * MOST_IDS], [b"", b"\0" * (MOST_IDS + 4)]
URIS = [BLOBS + "a" * (1024 - len(BLOBS))], [BLOBS + "a" * (1025 - len(BLOBS))]
MEDIA_TYPES = ["a/b", "image/" + "x" * 122], ["", "image", "image/" + "x" * 123]

SLUGS = ["", "a_9", "a" * 64], ["A", "a b", "a" * 65]
STORES = ["", "file:///a", "s3://bucket/a"], ["http://a", "file://a", "file:///a\n", f"s3://{'a' * 1024}"]
CODE_PATHS = ["a.py", "data/a b.txt", "a" * 100], ["", ".py", "../a.py", "a/../b", "/a", "a//b", "a" * 101]
NO_ENTRY = "9" * 20 + "-0"  # beyond the 64 bits of an entry's id in Redis
READ = versions.StoreRead(kind=versions.STORE_READ_KIND_GET, key="run/solver/latest")
ROWS = [
    Row(create(), "run.run_id", ["a", "a" * 64, "0-a"], ["", "a" * 65, "-a", "A"]),
    Row(create(), "run.recipe_yaml", [RECIPE.ljust(65536, "#")], [RECIPE.ljust(65537, "#")]),
    Row(create(), "run.store_uri", *STORES),
    Row(create(code=ONE_FILE), "run.code.files.path", *CODE_PATHS, mend=created),
    Row(request_of(runs.ListRunsRequest), "page_size"),
    Row(request_of(runs.ListRunsRequest), "page_token", ["", "0", "17"], ["x", "-1"]),
    Row(request_of(runs.DeleteRunRequest), "run_id", ["gone"], ["", "Gone", "a" * 65]),
    Row(request_of(runs.JoinRunRequest, max_concurrent_tasks=1), "node_id", ["a" * 64, "A._-9"], ["", "a b", "a" * 65]),
    Row(request_of(runs.JoinRunRequest), "max_concurrent_tasks"),
    Row(request_of(runs.JoinRunRequest, max_concurrent_tasks=1), "hardware"),
    Row(request_of(runs.JoinRunRequest, max_concurrent_tasks=1), "price_per_hour"),
    Row(submit(), "tasks", element=lambda index: task_pb2.Task(task_id=f"many-{index}")),
    Row(submit(), "tasks.task_id", ["a" * 128, "A._:-9"], ["", "a b", "a" * 129]),
    Row(submit(), "tasks.messages.role", ["system", "user", "assistant", "tool"], ["", "User", "users"]),
    Row(submit(), "tasks.messages.content"),
    Row(submit(), "tasks.messages.tool_calls.arguments_json"),
    Row(submit(), "tasks.data_json", [json_of(KIB64)], [json_of(KIB64 + 1)]),
    Row(submit(), "tasks.group_size"),
    Row(submit(), "tasks.source"),
    Row(submit(), "tasks.priority"),
    Row(request_of(tasks.LeaseTasksRequest), "max_tasks"),
    Row(request_of(tasks.LeaseTasksRequest, max_tasks=1), "wait_duration"),
    Row(request_of(tasks.RenewLeasesRequest), "lease_ids"),
    Row(request_of(tasks.FailTaskRequest, failure=tasks.LeaseFailure(lease_id="t#1")), "failure.detail"),
    Row(request_of(tasks.FailTaskRequest, failure=tasks.LeaseFailure(lease_id="t#1")), "failure.reason", *SLUGS),
    Row(work(renewal=tasks.Renewal()), "renewal.lease_ids"),
    Row(work(receipt=tasks.Receipt()), "receipt.lease_ids"),
    Row(work(credits=tasks.Credits()), "credits.waiting_for"),
    Row(work(credits=tasks.Credits()), "credits.weight_faults", element=lambda _: FAULT),
    Row(work(credits=tasks.Credits()), "credits.bounded_by"),
    Row(work(credits=tasks.Credits()), "credits.engine_loads", element=lambda _: LOAD),
    Row(work(credits=tasks.Credits(engine_loads=[LOAD])), "credits.engine_loads.fault"),
    Row(work(credits=tasks.Credits()), "credits.engine_faults", element=lambda _: HUNG),
    *(
        Row(work(credits=tasks.Credits(engine_faults=[HUNG])), f"credits.engine_faults.{name}")
        for name in ("reason", "detail")
    ),
    *(
        Row(work(credits=tasks.Credits(weight_faults=[FAULT])), f"credits.weight_faults.{name}")
        for name in ("policy_id", "tensor", "problem")
    ),
    Row(trajectories.PushRequest(episodes=[push().episode]), "sequence"),
    Row(trajectories.PushRequest(sequence=1), "episodes", element=lambda _: push().episode),
    Row(push(), "episode.task_id"),
    Row(push(), "episode.episode_id", ["!", "~" * 128], ["", "a b", "é", "a" * 129], slugs=("bad_id",)),
    Row(push(), "episode.member"),
    Row(push(), "episode.trajectories", element=lambda i: make_trajectory(f"e.{i}"), slugs=("too_many_trajectories",)),
    Row(push(), "episode.metrics", slugs=("bad_metrics",)),
    Row(push(), "episode.draws", slugs=("too_many_draws",)),
    Row(push(), "episode.trajectories.body", slugs=("too_large",)),
    Row(push(), "episode.trajectories.header.trajectory_id", ["~" * 128], ["", "a b", "a" * 129], slugs=("bad_id",)),
    Row(push(), "episode.trajectories.header.role", ["", "~" * 64], ["a b", "a" * 65], slugs=("bad_role",)),
    Row(push(), "episode.trajectories.header.num_trainable_tokens", [4], [0], slugs=("no_trainable_tokens",)),
    Row(push(), "episode.trajectories.header.metrics", slugs=("bad_metrics",)),
    Row(body(), "token_ids", *TOKENS, mend=pushed, slugs=("empty", "too_long")),
    Row(body(), "media", element=media, mend=pushed, slugs=("too_many_media",)),
    Row(body(), "media.blob.uri", *URIS, mend=pushed, slugs=("bad_blob",)),
    Row(body(), "media.blob.sha256", mend=pushed, slugs=("bad_blob",)),
    Row(body(), "media.blob.num_bytes", mend=pushed, slugs=("bad_blob",)),
    Row(body(), "media.blob.media_type", *MEDIA_TYPES, mend=pushed, slugs=("bad_blob",)),
    Row(request_of(batches.AcquireBatchRequest), "step"),
    Row(request_of(batches.AcquireBatchRequest, step=1), "wait_duration"),
    Row(request_of(batches.FetchBatchRequest), "step"),
    Row(request_of(batches.AckBatchRequest, stage=batches.BATCH_STAGE_INTENT), "step"),
    Row(request_of(batches.NackBatchRequest), "step"),
    Row(request_of(batches.NackBatchRequest, step=1), "reason", *SLUGS),
    Row(request_of(batches.RenewBatchRequest), "step"),
    Row(request_of(batches.ClaimPolicyRequest), "accepted_loss.identity", ["a" * 32], ["a" * 33, "A" * 32]),
    Row(request_of(batches.HoldPolicyRequest), "waiting_for", ["", "a_9", "a" * 64], ["A", "a b", "a" * 65]),
    Row(request_of(batches.HoldPolicyRequest, waiting_for="warm_start"), "detail"),
    Row(request_of(batches.HoldPolicyRequest, waiting_for="warm_start"), "progress"),
    Row(request_of(batches.ReleasePolicyRequest), "doubt"),
    Row(request_of(batches.VoidBatchRequest, action=batches.VOID_ACTION_RETURN), "step"),
    Row(request_of(batches.VoidBatchRequest, action=batches.VOID_ACTION_RETURN, step=1), "reason"),
    Row(publish(), "version.version", mend=of_a_later_step),
    Row(publish(), "version.manifest_sha256"),
    Row(publish(), "version.density", outside=[math.nan]),
    Row(publish(), "num_unreadable_before"),
    Row(request_of(versions.ListVersionsRequest), "page_size"),
    Row(request_of(versions.ListVersionsRequest), "page_token", ["", "0"], ["x"]),
    Row(request_of(versions.PinVersionRequest), "reason"),
    Row(request_of(versions.SignReadsRequest), "reads", element=lambda i: READ),
    Row(request_of(versions.SignReadsRequest, reads=[READ]), "reads.key"),
    Row(request_of(versions.SignReadsRequest, reads=[READ]), "reads.after"),
    Row(request_of(admin.AdminServiceWatchRequest), "interval_duration"),
    Row(request_of(admin.ListNodesRequest), "page_size"),
    Row(request_of(admin.DrainNodeRequest, node_id="gone"), "reason", *SLUGS),
    Row(admin.RevokeTokenRequest(), "token.token_id", ["a", "~" * 128], ["", "a b", "a" * 129]),
    Row(
        request_of(evaluations.RequestEvaluationRequest),
        "evaluation_id",
        ["a", "a" * 40],
        ["", "A", "-a", "a" * 41],
    ),
    *(
        Row(request_of(evaluations.RequestEvaluationRequest, evaluation_id="e"), name)
        for name in ("num_tasks", "samples_per_task")
    ),
    Row(
        request_of(evaluations.RequestEvaluationRequest, evaluation_id="e"),
        "tasks",
        element=lambda i: task_pb2.Task(task_id=f"own-{i}"),
    ),
    Row(request_of(evaluations.ListEvaluationsRequest), "page_size"),
    Row(request_of(evaluations.ListEvaluationsRequest), "page_token", ["", "0"], ["x"]),
    Row(request_of(evaluations.GetEvaluationRequest), "page_size"),
    Row(request_of(evaluations.GetEvaluationRequest), "page_token", ["", "0"], ["x"]),
    Row(request_of(admin.ListDeadLettersRequest), "page_size"),
    Row(request_of(admin.ListDeadLettersRequest), "page_token", ["", "1-0"], ["x", "1", NO_ENTRY]),
    *(
        Row(request_of(kind), "dead_letter_ids", [["1-0"]], [["x"], [NO_ENTRY]], element=lambda i: f"{i + 1}-0")
        for kind in (admin.RequeueDeadLettersRequest, admin.PurgeDeadLettersRequest)
    ),
]  # fmt: skip


async def refused(world: World, row: Row, value: object, *, timeout_s: float) -> bool:
    """Whether the server refuses the value: by an error, or by the outcome POISON and a slug of the row."""
    try:
        answered = await answer(world, row.with_value(value), timeout_s=timeout_s)
    except DeadlineError:
        return False  # a long poll that was taken
    except AstraflowError as error:
        # It says what, which value and which limit.
        return error.reason in REFUSED and len(error.message) > 20
    return getattr(getattr(answered, "result", None), "reason", None) in row.slugs


async def test_values_inside_are_taken_and_values_outside_refused_or_cut(world: World) -> None:
    await world.create_run(name="run")
    await world.trainer()
    await world.node("n1")
    wrong = []
    for row in ROWS:
        message, described = row.place()
        clamped = described.GetOptions().Extensions[options_pb2.bounds].clamped
        inside, outside = values(row)
        assert inside + outside, row.path
        tried = [(value, False) for value in inside] + [(value, not clamped) for value in outside]
        for value, wanted in tried:
            is_long_poll = row.path == "wait_duration" and not wanted
            if await refused(world, row, value, timeout_s=0.3 if is_long_poll else 20.0) is not wanted:
                verb = "takes" if wanted else "refuses"
                wrong.append(f"{message.full_name}.{described.name} {verb} {value!r:.60}")
    assert wrong == []

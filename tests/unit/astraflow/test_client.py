"""Both twins of the client against a real server on loopback that follows a script."""

import asyncio
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from astraflow import errors
from astraflow._status import to_status
from astraflow.client import AsyncClient, Client, Connection, RetryPolicy, correlated, typed_stream
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.dataflow.v1.batch_service_pb2_grpc import BatchServiceServicer
from astraflow.dataflow.v1.run_service_pb2_grpc import RunServiceServicer
from astraflow.dataflow.v1.trajectory_service_pb2_grpc import TrajectoryServiceServicer
from astraflow.dataflow.v1.version_service_pb2_grpc import VersionServiceServicer
from support.scripted_dataflow import register

pytestmark = pytest.mark.slow

FAST = RetryPolicy(total_s=20.0, first_wait_s=0.01, max_wait_s=0.05)
ONCE = RetryPolicy(total_s=0.0)
PATIENCE_S = 20.0

Kind = type[errors.AstraflowError]
KINDS = list(errors.ERRORS_BY_REASON.values())
REPEATABLE = [errors.UnavailableError, errors.PayloadMissingError]

READ, IDEMPOTENT, NEVER = "runs.GetRun", "batches.AckBatch", "batches.ClaimPolicy"
REQUESTS: dict[str, Any] = {
    READ: runs.GetRunRequest(),
    IDEMPOTENT: batches.AckBatchRequest(step=1, stage=batches.BATCH_STAGE_INTENT),
    NEVER: batches.ClaimPolicyRequest(),
}


@dataclass
class Script(RunServiceServicer, BatchServiceServicer, VersionServiceServicer, TrajectoryServiceServicer):
    """One rpc of each kind: a call meets the next act, and nothing special afterwards."""

    acts: deque[Callable[[grpc.ServicerContext], object]] = field(default_factory=deque)
    seen: list[dict[str, str]] = field(default_factory=list)
    """The metadata of every call so far."""
    remaining_s: list[float] = field(default_factory=list)
    """Time each call had left when it arrived."""
    entered: threading.Event = field(default_factory=threading.Event)
    left_by_client: threading.Event = field(default_factory=threading.Event)

    def fail(self, *failures: errors.AstraflowError) -> None:
        """Answer the next calls with these errors."""
        self.acts.extend(partial(_abort, failure=failure) for failure in failures)

    def hang(self) -> None:
        """Answer the next call only when its client has left."""
        self.acts.append(self._hang)

    def _hang(self, context: grpc.ServicerContext) -> None:
        context.add_callback(self.left_by_client.set)
        self.entered.set()
        self.left_by_client.wait(PATIENCE_S)

    def act(self, context: grpc.ServicerContext) -> None:
        self.seen.append({key: str(value) for key, value in context.invocation_metadata()})
        self.remaining_s.append(context.time_remaining() or math.inf)
        if self.acts:
            self.acts.popleft()(context)

    def GetRun(self, request: Any, context: Any) -> runs.GetRunResponse:
        self.act(context)
        return runs.GetRunResponse(run=run_pb2.Run(run_id="tiny"))

    def AckBatch(self, request: Any, context: Any) -> batches.AckBatchResponse:
        self.act(context)
        return batches.AckBatchResponse(stage=batches.BATCH_STAGE_TRAINED)

    def ClaimPolicy(self, request: Any, context: Any) -> batches.ClaimPolicyResponse:
        self.act(context)
        return batches.ClaimPolicyResponse(trainer_epoch=1)

    def Watch(self, request: Any, context: Any) -> Iterator[versions.WatchResponse]:
        """Three versions; the script acts before each one."""
        for version in range(3):
            self.act(context)
            yield versions.WatchResponse(version=version_pb2.Version(version=version))

    def Push(self, request_iterator: Any, context: Any) -> Iterator[trajectories.PushResponse]:
        for request in request_iterator:
            self.act(context)
            yield trajectories.PushResponse(sequence=request.sequence)


def _abort(context: grpc.ServicerContext, *, failure: errors.AstraflowError) -> None:
    context.abort_with_status(rpc_status.to_status(to_status(failure)))


def _pass(context: grpc.ServicerContext) -> None:
    del context


@contextmanager
def serving(script: Script, *, port: int = 0) -> Iterator[str]:
    """A real server on loopback; yields its address."""
    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    register(script, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


OnWait = Callable[[errors.AstraflowError, float], None]


class BlockingTwin:
    """`Client`, driven by rpc names."""

    def __init__(self, address: str, **options: Any) -> None:
        self._client = Client(address, **options)

    def call(self, rpc: str, **options: Any) -> Any:
        return self._client.call(attrgetter(rpc)(self._client), REQUESTS[rpc], **options)

    def watch(self, *, take: int) -> list[int]:
        """The first versions of a watch, then leaves."""
        notices = self._client.stream(self._client.versions.Watch, versions.WatchRequest())
        return [notice.version.version for notice in islice(notices, take)]

    def on_wait(self, told: OnWait) -> None:
        self._client.on_wait = told

    def end_within(self, seconds: float) -> None:
        self._client.end_within(seconds)

    def close(self) -> None:
        self._client.close()


class AsyncioTwin:
    """`AsyncClient`, driven by rpc names, in an event loop that runs as long as the client lives."""

    def __init__(self, address: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def connect() -> AsyncClient:
            return AsyncClient(address, **options)

        self._client = self._run(connect())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * PATIENCE_S)

    def call(self, rpc: str, **options: Any) -> Any:
        return self._run(self._client.call(attrgetter(rpc)(self._client), REQUESTS[rpc], **options))

    def watch(self, *, take: int) -> Any:
        return self._run(self._watch(take))

    async def _watch(self, take: int) -> list[int]:
        found: list[int] = []
        async for notice in self._client.stream(self._client.versions.Watch, versions.WatchRequest()):
            found.append(notice.version.version)
            if len(found) == take:
                break
        return found

    def on_wait(self, told: OnWait) -> None:
        self._client.on_wait = told

    def end_within(self, seconds: float) -> None:
        self._client.end_within(seconds)

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


Twin = BlockingTwin | AsyncioTwin
Connect = Callable[..., Twin]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as found:
        yield found


@pytest.fixture(params=[BlockingTwin, AsyncioTwin], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind, and closes it."""
    made: list[Twin] = []

    def make(address: str, **options: Any) -> Twin:
        made.append(request.param(address, **{"retry": FAST, **options}))
        return made[-1]

    yield make
    for twin in made:
        twin.close()


@pytest.fixture
def twin(connect: Connect, address: str) -> Twin:
    """A client of the server that follows the script."""
    return connect(address)


@pytest.mark.parametrize("rpc", REQUESTS)
def test_a_call_returns_the_response(twin: Twin, rpc: str) -> None:
    assert type(twin.call(rpc)).__name__ == f"{rpc.partition('.')[2]}Response"


def test_a_call_carries_a_deadline_even_when_none_is_given(twin: Twin, script: Script) -> None:
    twin.call(READ)
    twin.call(READ, timeout_s=7_200.0)
    default_s, given_s = script.remaining_s
    # Orders of magnitude apart: neither a slow machine nor gRPC's rounding on the wire decides. None at all is years.
    assert default_s < 60 < given_s < 8_000


@pytest.mark.parametrize("rpc", [READ, IDEMPOTENT])
def test_a_silent_server_is_asked_again_where_that_is_harmless(twin: Twin, script: Script, rpc: str) -> None:
    script.hang()
    twin.call(rpc, timeout_s=0.5)
    assert len(script.seen) == 2


def test_a_silent_server_is_a_deadline_error_when_the_budget_is_spent(twin: Twin, script: Script) -> None:
    script.hang()
    with pytest.raises(errors.DeadlineError):
        twin.call(READ, timeout_s=0.5, retry=RetryPolicy(total_s=0.4))
    assert len(script.seen) == 1


def test_a_call_that_may_act_twice_is_repeated_only_by_leave_of_its_caller(
    twin: Twin, script: Script
) -> None:
    script.fail(errors.UnavailableError("away"))
    twin.call(NEVER, harmless=True)
    assert len(script.seen) == 2


def test_whoever_waits_hears_why_and_for_how_long_and_ends_sooner_when_told(
    connect: Connect, address: str, script: Script
) -> None:
    told: list[tuple[str, float]] = []
    twin = connect(address, retry=RetryPolicy(total_s=math.inf, first_wait_s=0.05, max_wait_s=0.05))

    def note(error: errors.AstraflowError, waited_s: float) -> None:
        told.append((error.metadata["reason"], waited_s))
        if len(told) == 3:
            twin.end_within(0.0)

    twin.on_wait(note)
    script.fail(*[errors.UnavailableError("away", metadata={"reason": "redis_silent"})] * 50)
    with pytest.raises(errors.UnavailableError):
        twin.call(READ)
    assert [reason for reason, _ in told] == ["redis_silent"] * 3
    assert 0 <= told[0][1] < told[1][1] < told[2][1]


def test_a_stream_that_only_reads_begins_anew_where_it_broke(address: str, script: Script) -> None:
    def lost(context: grpc.ServicerContext) -> None:
        _abort(context, failure=errors.UnavailableError("Redis restarts"))

    script.acts.extend([_pass, lost])
    with Client(address, retry=FAST) as client:
        found = client.read_all(client.versions.Watch, versions.WatchRequest(), timeout_s=PATIENCE_S)
    assert [notice.version.version for notice in found] == [0, 1, 2]
    assert len(script.seen) == 2 + 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_served_error_is_raised_as_itself(twin: Twin, script: Script, kind: Kind) -> None:
    script.fail(kind("3 exceeds 2; lower it", metadata={"field": "steps"}, retry_after_s=1.5))
    with pytest.raises(kind, match="3 exceeds 2; lower it") as caught:
        twin.call(READ, retry=ONCE)
    assert type(caught.value) is kind
    assert (caught.value.metadata, caught.value.retry_after_s) == ({"field": "steps"}, 1.5)
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize("rpc", [READ, IDEMPOTENT])
@pytest.mark.parametrize("kind", REPEATABLE)
def test_a_harmless_call_is_repeated_until_it_succeeds(
    twin: Twin, script: Script, rpc: str, kind: Kind
) -> None:
    script.fail(kind("1"), kind("2"), kind("3"))
    twin.call(rpc)
    assert len(script.seen) == 4


@pytest.mark.parametrize(
    ("rpc", "kind"),
    [(NEVER, errors.UnavailableError), *((IDEMPOTENT, kind) for kind in KINDS if kind not in REPEATABLE)],
)
def test_an_answer_is_final_and_so_is_any_error_of_a_call_that_may_act_twice(
    twin: Twin, script: Script, rpc: str, kind: Kind
) -> None:
    script.fail(kind("no", retry_after_s=0.0))
    with pytest.raises(kind):
        twin.call(rpc)
    assert len(script.seen) == 1


def test_a_message_that_no_server_takes_is_refused_before_it_is_sent(
    twin: Twin, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REQUESTS, READ, runs.GetRunRequest(run_id="x" * (64 * 2**20)))
    complaint = r"GetRunRequest has \d+ bytes, at most 67108864; send"
    with pytest.raises(errors.InvalidArgumentError, match=complaint):
        twin.call(READ)
    assert script.seen == []


def test_the_servers_hint_replaces_the_wait(connect: Connect, address: str, script: Script) -> None:
    # Its own wait would be longer than the patience, so only the hint makes a second attempt possible.
    slow = RetryPolicy(total_s=PATIENCE_S, first_wait_s=1000.0, max_wait_s=1000.0)
    script.fail(errors.UnavailableError("busy", retry_after_s=0.05))
    connect(address, retry=slow).call(READ)
    assert len(script.seen) == 2


def test_a_hint_beyond_the_patience_ends_the_call_at_once(twin: Twin, script: Script) -> None:
    script.fail(errors.UnavailableError("busy", retry_after_s=1000.0))
    with pytest.raises(errors.UnavailableError) as caught:
        twin.call(READ)
    assert len(script.seen) == 1
    assert caught.value.retry_after_s == 1000.0


def test_no_attempt_starts_after_the_total(connect: Connect, address: str, script: Script) -> None:
    script.fail(*[errors.UnavailableError("away")] * 50)
    # Every wait is at least half of 0.2 s: however slow or fast the machine, at most 1 + 0.5 / 0.1 attempts.
    with pytest.raises(errors.UnavailableError):
        connect(address, retry=RetryPolicy(total_s=0.5, first_wait_s=0.2, max_wait_s=0.2)).call(READ)
    assert len(script.seen) <= 6


def test_the_policy_of_a_call_wins_over_the_clients(connect: Connect, address: str, script: Script) -> None:
    script.fail(errors.UnavailableError("away"))
    with pytest.raises(errors.UnavailableError):
        connect(address, retry=FAST).call(READ, retry=ONCE)
    assert len(script.seen) == 1


def test_nobody_listening_is_unavailable(connect: Connect, script: Script) -> None:
    with serving(script) as address:
        pass
    with pytest.raises(errors.UnavailableError):
        connect(address).call(READ, retry=ONCE)


@contextmanager
def beside(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Work in a thread, which is told when the block is left."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=[over])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_restarted_server_is_found_by_the_call_that_missed_it(connect: Connect, script: Script) -> None:
    with serving(script) as address:
        twin = connect(address)
        twin.call(READ)

    def come_back(over: threading.Event) -> None:
        # Late enough that the first attempts meet a closed port on any machine that is not asleep.
        over.wait(0.3)
        with serving(script, port=port_of(address)):
            over.wait(PATIENCE_S)

    with beside(come_back):
        twin.call(READ)
        twin.call(IDEMPOTENT)
    assert len(script.seen) == 3


def test_a_call_in_flight_when_its_server_goes_is_repeated(connect: Connect, script: Script) -> None:
    addresses: queue.Queue[str] = queue.Queue()
    script.hang()

    def live_twice(over: threading.Event) -> None:
        with serving(script) as address:
            addresses.put(address)
            script.entered.wait(PATIENCE_S)
        with serving(script, port=port_of(address)):
            over.wait(PATIENCE_S)

    with beside(live_twice):
        connect(addresses.get(timeout=PATIENCE_S)).call(READ)
    assert len(script.seen) == 2


def test_a_token_travels_with_every_call(connect: Connect, address: str, script: Script) -> None:
    twin = connect(Connection(address, token="s3cret"))
    twin.call(READ)
    twin.watch(take=3)
    assert [seen["authorization"] for seen in script.seen] == ["Bearer s3cret"] * 4


def test_calls_inside_the_block_carry_its_correlation_id(twin: Twin, script: Script) -> None:
    with correlated("step-1"):
        with correlated("step-1/publish"):
            twin.call(READ)
        twin.watch(take=1)
    twin.call(READ)
    assert [seen.get("x-correlation-id") for seen in script.seen[:2]] == ["step-1/publish", "step-1"]
    assert "x-correlation-id" not in script.seen[-1]


@pytest.mark.parametrize("correlation_id", ["", "a\nb", "ü", "x" * 65])
def test_an_unprintable_correlation_id_is_refused(correlation_id: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 printable"), correlated(correlation_id):
        pass


def test_a_stream_ends_when_the_server_ends_it(twin: Twin) -> None:
    assert twin.watch(take=99) == [0, 1, 2]


def test_a_failed_stream_raises_its_typed_error_and_is_not_repeated(twin: Twin, script: Script) -> None:
    script.acts.append(lambda context: None)
    script.fail(errors.UnavailableError("store is away", retry_after_s=0.0))
    with pytest.raises(errors.UnavailableError, match="store is away") as caught:
        twin.watch(take=99)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert len(script.seen) == 2


def test_leaving_a_stream_cancels_it(twin: Twin, script: Script) -> None:
    script.acts.append(lambda context: context.add_callback(script.left_by_client.set))
    script.hang()
    assert twin.watch(take=1) == [0]
    assert script.left_by_client.wait(PATIENCE_S)


async def test_a_cancelled_caller_cancels_its_call(address: str, script: Script) -> None:
    script.hang()
    async with AsyncClient(address) as client:
        call = asyncio.create_task(client.call(client.runs.GetRun, REQUESTS[READ]))
        await until_set(script.entered)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_set(script.left_by_client)


async def test_closing_a_streams_generator_cancels_the_stream(address: str, script: Script) -> None:
    script.acts.append(lambda context: context.add_callback(script.left_by_client.set))
    script.hang()
    async with AsyncClient(address) as client:
        notices = client.stream(client.versions.Watch, versions.WatchRequest())
        await anext(notices)
        await notices.aclose()
        await until_set(script.left_by_client)


async def test_a_bidirectional_stream_is_the_callers_to_drive(address: str, script: Script) -> None:
    async with AsyncClient(address) as client:
        with correlated("push-1"):
            call = client.open(client.trajectories.Push)
        await call.write(trajectories.PushRequest(sequence=7))
        assert (await anext(aiter(call))).sequence == 7
        script.fail(errors.FencedError("a newer incarnation joined"))
        await call.write(trajectories.PushRequest(sequence=8))
        with pytest.raises(errors.FencedError):
            await anext(typed_stream(call))
    assert script.seen[0]["x-correlation-id"] == "push-1"


async def until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_S)


def test_waits_double_up_to_their_bound_and_differ_between_callers() -> None:
    policy = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0)
    for attempt, ceiling_s in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (100_000, 1.0)]:
        waits = [policy.wait_s(attempt) for _ in range(50)]
        assert all(0.5 * ceiling_s <= wait_s <= ceiling_s for wait_s in waits)
        assert len(set(waits)) > 1


@pytest.mark.parametrize("hint_s", [0.0, -1.0])
def test_a_hint_of_nothing_still_leaves_the_server_a_moment(hint_s: float) -> None:
    assert RetryPolicy().wait_s(1, hint_s=hint_s) > 0


def test_pages_are_asked_for_until_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def call(_: Client, __: object, request: runs.ListRunsRequest) -> object:
        asked.append(request.page_token)
        return runs.ListRunsResponse(next_page_token={"": "1", "1": "2", "2": ""}[request.page_token])

    monkeypatch.setattr(Client, "call", call)
    with Client("127.0.0.1:1") as client:
        pages = list(client.pages(client.runs.ListRuns, runs.ListRunsRequest(page_size=5)))
    assert (len(pages), asked) == (3, ["", "1", "2"])

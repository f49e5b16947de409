"""Working sessions: one open `Work` stream of one node.

The session sends leases within the node's credits as soon as there are any, cancels what the node lost,
announces versions and the durable watermark, and orders the drain. It holds nothing that matters: when the stream
breaks, leases that the node confirmed stay in Redis until they expire, the others are given back, and a new stream
of the same incarnation goes on. Made by the task service per stream.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from astraflow.dataflow.v1 import task_service_pb2, version_pb2
from astraflow.errors import AstraflowError, DeadlineError, InvalidArgumentError, UnavailableError
from astraflow_dataflow.records import Event, Offer
from astraflow_dataflow.runs.lease_seals import LeaseSeals
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.store.wakeups import Subscription
from astraflow_dataflow.tasks.leasing import Leasing, lost_of
from astraflow_dataflow.versions.announcements import Versions
from astraflow_kit.awake import Silence
from astraflow_kit.identity.sealing import Session
from astraflow_kit.log import get_logger

if TYPE_CHECKING:
    from google.protobuf.message import Message

log = get_logger(__name__)

Request = task_service_pb2.WorkRequest
Response = task_service_pb2.WorkResponse
_REPORTED = ("engine_restarts", "waiting_for", "waiting_detail", "max_episodes", "bounded_by")
"""Of the credits, what is kept as it is."""

HEARTBEAT_S = 3.0
_CONNECTED_MS = 15_000
# Wake-ups of many groups arrive in bursts: one lease call answers them together.
_SETTLE_S = 0.002


class Following:
    """How long the node of a session takes from the notice of a version until it serves it."""

    def __init__(self) -> None:
        self._told_s: dict[tuple[str, int], float] = {}

    def told(self, policy_id: str, version: int, *, now_s: float) -> None:
        """A version is announced to the node now."""
        self._told_s[policy_id, version] = now_s

    def served(self, serving: Mapping[str, int], *, now_s: float) -> dict[str, int]:
        """It serves these versions: what is kept of it, where one of them is new."""
        taken_s = [now_s - at_s for told, at_s in self._told_s.items() if serving.get(told[0]) == told[1]]
        self._told_s = {
            told: at_s for told, at_s in self._told_s.items() if serving.get(told[0], -1) < told[1]
        }
        return {"follow_ms": round(1000 * max(taken_s))} if taken_s else {}


class WorkSession:
    """One node's stream. `responses` is the whole life of it."""

    def __init__(
        self,
        context: RunContext,
        hello: task_service_pb2.Hello,
        *,
        node: Session,
        store: Store,
        leasing: Leasing,
        versions: Versions,
        durability: Durability,
        silence_s: float,
    ) -> None:
        """`node` is the proven session of who speaks; it is over once nothing comes from the node for `silence_s`."""
        self._context = context
        self._node, self._node_id = node, node.name
        self._seals = LeaseSeals(node, context.seal_key)
        self._store = store
        self._leasing = leasing
        self._versions = versions
        self._durability = durability
        self._held = list(hello.held.lease_ids) if hello.HasField("held") else None
        self._session = secrets.token_hex(8)
        self._asking: asyncio.Task[Offer] | None = None
        self._unconfirmed: set[str] = set()
        """Leases that were sent on this stream and that the node has not mentioned yet."""
        self._sent_position = 0
        self._data_incarnation = context.data_incarnation
        self._max_held = 0
        self._credits = 0
        self._num_sent = 0
        """Leases sent on this stream."""
        self._serving: dict[str, int] = {}
        self._faults: list[version_pb2.WeightFault] = []
        self._announced: dict[str, int] = {}
        self._following = Following()
        self._lost: list[str] = []
        self._drained = False
        self._drain_reason = ""
        """As the newest report was answered."""
        self._report_again_s = self._look_again_s = 0.0
        self._beat_s = min(HEARTBEAT_S, silence_s / 3)
        self._num_beats = 0
        self._silence_s = silence_s
        self._silence = Silence(period_s=self._beat_s)
        self._num_heard = 0
        self._failure: AstraflowError | None = None

    async def responses(self, requests: AsyncIterator[Request]) -> AsyncIterator[Response]:
        """Yield what the node must know until it closes the stream. Raises FencedError, NotFoundError."""
        topics = ["run", "durable", f"node {self._node_id}"]
        topics += [f"version {policy_id}" for policy_id in self._context.policy_ids]
        await self._report({"session": self._session})
        await self._reconcile()
        self._max_held = await self._store.nodes.max_tasks(self._context.run_id, self._node_id)
        log.info("session.opened", node_id=self._node_id)
        with self._context.wakeups.subscribe(*topics) as inbox:
            reader = asyncio.create_task(
                self._read(requests, inbox.poke), name=f"requests of {self._node_id}"
            )
            try:
                async for response in self._respond(reader, inbox):
                    yield response
            finally:
                reader.cancel()
                self._context.wakeups.work_waiters.leave(inbox)
                await self._leave()
        if self._failure is not None:
            raise self._failure

    async def _respond(self, reader: asyncio.Task[None], inbox: Subscription) -> AsyncIterator[Response]:
        events: list[Event] = []
        work_waiters = self._context.wakeups.work_waiters
        while True:
            ended = reader.done()
            self._require_same_data()
            self._require_a_node_that_lives()
            for response in await self._news(events):
                yield response
            for response in await self._leases(inbox):
                yield response
            if ended:
                return
            if self._wants_work:
                work_waiters.wait(inbox)
            events = await inbox.wait(self._beat_s)
            await asyncio.sleep(_SETTLE_S)

    @property
    def _wants_work(self) -> bool:
        return self._credits > 0 and not self._drained

    async def _reconcile(self) -> None:
        """Give back what an earlier stream was given and the node, which says what it holds, never got."""
        if self._held is None:
            return
        own = self._leasing.own(self._context, self._held, node=self._node)
        lost, given_back = await self._store.nodes.reconcile(
            self._context.run_id,
            node_id=self._node_id,
            held=list(own.values()),
            ttl_s=self._context.recipe.dataflow.lease_ttl_s,
        )
        self._lost += lost_of(self._held, own=own, lost=lost)
        if given_back:
            log.info("leases.undelivered", node_id=self._node_id, count=given_back)

    def _require_same_data(self) -> None:
        if self._context.data_incarnation != self._data_incarnation:
            raise UnavailableError(
                "Redis was restarted and may have lost its last second; join again, then push again what is not "
                "durable",
                retry_after_s=0.1,
            )

    def _require_a_node_that_lives(self) -> None:
        if self._silence.look(self._num_heard) >= self._silence_s:
            raise DeadlineError(
                f"nothing came from node {self._node_id} for {self._silence_s:g} s; open another session, and say "
                f"something every {self._beat_s:g} s"
            )

    async def _read(self, requests: AsyncIterator[Request], poke: Callable[[], None]) -> None:
        try:
            async for request in requests:
                self._num_heard += 1
                await self._take(request)
                poke()
        except AstraflowError as error:
            self._failure = error
        finally:
            poke()

    async def _take(self, request: Request) -> None:
        kind = request.WhichOneof("kind")
        if kind == "credits":
            await self._take_credits(request.credits)
        elif kind == "renewal":
            await self._renew(list(request.renewal.lease_ids))
        elif kind == "receipt":
            # Confirmed leases run from their arrival.
            await self._renew(list(request.receipt.lease_ids))
        elif kind == "failure":
            self._unconfirmed.discard(request.failure.lease_id)
            await self._leasing.fail(self._context, request.failure, node=self._node)
        else:
            raise InvalidArgumentError(
                f"{kind or 'an empty request'} is not expected here: `hello` comes first and once"
            )

    async def _take_credits(self, credits_given: task_service_pb2.Credits) -> None:
        counted = (
            credits_given.leases_received if credits_given.HasField("leases_received") else self._num_sent
        )
        self._credits = max(0, credits_given.tasks - max(0, self._num_sent - counted))
        self._serving = dict(credits_given.serving_versions)
        await self._report(
            {
                "serving": json.dumps(self._serving),
                "tokens": credits_given.tokens_sampled,
                "weight_faults": self._weight_faults(credits_given.weight_faults),
                "credits": credits_given.tasks,
                "engine_loads": _stored(credits_given.engine_loads),
                "engine_faults": _stored(credits_given.engine_faults),
                **{name: getattr(credits_given, name) for name in _REPORTED},
                **self._following.served(self._serving, now_s=self._now_s()),
            }
        )

    def _weight_faults(self, reported: Sequence[version_pb2.WeightFault]) -> str:
        """What is kept of a node's faults; each new one is logged once."""
        for fault in reported:
            if fault not in self._faults:
                log.error(
                    "node.weight_fault",
                    node_id=self._node_id,
                    policy_id=fault.policy_id,
                    version=fault.version,
                    tensor=fault.tensor,
                    tile=fault.tile if fault.HasField("tile") else None,
                    problem=fault.problem,
                    waiting_for=fault.waiting_for,
                )
        self._faults = list(reported)
        return _stored(reported)

    async def _renew(self, lease_ids: list[str]) -> None:
        self._unconfirmed.difference_update(lease_ids)
        self._lost += await self._leasing.renew(self._context, node=self._node, lease_ids=lease_ids)

    async def _news(self, events: Sequence[Event]) -> list[Response]:
        responses = _cancels(events, self._seals)
        responses += [_cancel(lease_id, "lease_lost") for lease_id in self._lost]
        self._lost.clear()
        topics, beats = {event.topic.partition(" ")[0] for event in events}, self._beat_is_due()
        # A node that has just spoken was reported, and what that was answered is as new as a beat needs.
        if topics & {"run", "node"} or (beats and self._now_s() >= self._report_again_s):
            await self._report(heard=False)
        if beats:
            self._num_beats += 1
            responses.append(Response(beat=task_service_pb2.Beat(number=self._num_beats)))
        if beats or "durable" in topics:
            responses += self._watermark()
        if "version" in topics or (beats and self._knows_of_newer()):
            responses += [Response(version=version) for version in await self._new_versions()]
        if self._drain_reason and not self._drained:
            self._drained = True
            log.info("node.drain_sent", node_id=self._node_id, reason=self._drain_reason)
            responses.append(Response(drain=task_service_pb2.Drain(reason=self._drain_reason)))
        return responses

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _watermark(self) -> list[Response]:
        watermark = self._durability.watermark(self._context.run_id)
        if watermark is None or watermark.durable_position == self._sent_position:
            return []
        self._sent_position = watermark.durable_position
        return [Response(watermark=watermark)]

    def _beat_is_due(self) -> bool:
        """Once per heartbeat everything is looked at, whatever the events say."""
        if self._now_s() < self._look_again_s:
            return False
        self._look_again_s = self._now_s() + self._beat_s
        return True

    def _knows_of_newer(self) -> bool:
        """Whether this server knows of a version that was not announced on this stream."""
        newest = self._context.newest_versions
        return any(self._announced.get(policy_id, -1) < newest[policy_id] for policy_id in newest)

    async def _new_versions(self) -> list[version_pb2.Version]:
        found: list[version_pb2.Version] = []
        for policy_id in self._context.policy_ids:
            newest = await self._versions.for_nodes(self._context, policy_id, self._announced.get(policy_id))
            if newest:
                self._announced[policy_id] = newest[-1].version
                self._following.told(policy_id, newest[-1].version, now_s=self._now_s())
                found += newest
        return found

    async def _leases(self, inbox: Subscription) -> list[Response]:
        if not self._wants_work:
            self._context.wakeups.work_waiters.leave(inbox)
            return []
        self._context.wakeups.work_waiters.ask(inbox)
        asking = self._leasing.lease(
            self._context,
            node=self._node,
            want=self._credits,
            serving=self._serving,
            max_held=self._max_held,
            session=self._session,
        )
        # Goes on when the stream breaks meanwhile: what it is given must be given back.
        self._asking = asyncio.create_task(asking, name=f"leases of {self._node_id}")
        try:
            offer = await asyncio.shield(self._asking)
        except AstraflowError:
            self._asking = None
            raise
        self._asking = None
        self._unconfirmed.update(lease.lease_id for lease in offer.leases)
        self._context.wakeups.work_waiters.answered(inbox, more=offer.more)
        self._credits -= len(offer.leases)
        self._num_sent += len(offer.leases)
        return [Response(lease=lease) for lease in offer.leases]

    async def _report(self, fields: dict[str, str | int] | None = None, *, heard: bool = True) -> None:
        self._drain_reason = await self._store.nodes.report(
            self._node,
            connected_ms=_CONNECTED_MS,
            heard=heard,
            fields=fields,
        )
        self._report_again_s = self._now_s() + self._beat_s

    async def _leave(self) -> None:
        log.info("session.closed", node_id=self._node_id, unconfirmed_leases=len(self._unconfirmed))
        try:
            if self._asking is not None:
                self._unconfirmed.update(lease.lease_id for lease in (await self._asking).leases)
            await self._store.nodes.leave(
                self._context.run_id,
                node_id=self._node_id,
                session=self._session,
                undelivered=sorted(self._seals.own(self._unconfirmed).values()),
            )
        except AstraflowError as error:
            # The stream is over either way: without this note the node counts as connected for some seconds more,
            # and leases that never reached it end with their time.
            log.warning("session.leave_unnoted", node_id=self._node_id, message=error.message)


def _cancels(events: Sequence[Event], seals: LeaseSeals) -> list[Response]:
    """What a node hears of leases that it lost; an event has a line for each."""
    lost = [event.fields for event in events if "leases" in event.fields]
    return [
        _cancel(seals.sealed(lease), fields["reason"])
        for fields in lost
        for lease in fields["leases"].split("\n")
    ]


def _stored(messages: Sequence[Message]) -> str:
    return json.dumps([MessageToDict(message, preserving_proto_field_name=True) for message in messages])


def _cancel(lease_id: str, reason: str) -> Response:
    return Response(cancel=task_service_pb2.Cancel(lease_id=lease_id, reason=reason))

"""The dataflow server as one process: Redis, domain, servicers, pages, and the background work of each run.

The only place where parts are put together. The process keeps nothing that matters: kill it at any time, or
run two over one Redis. Called by `__main__`, and by tests that want a server inside their own loop.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict

from astraflow.dataflow.v1 import (
    admin_service_pb2_grpc,
    batch_service_pb2_grpc,
    evaluation_service_pb2_grpc,
    run_service_pb2_grpc,
    sample_service_pb2_grpc,
    task_service_pb2_grpc,
    trajectory_service_pb2_grpc,
    version_service_pb2_grpc,
)
from astraflow.errors import AstraflowError, NotFoundError
from astraflow.keda.v1 import external_scaler_pb2_grpc
from astraflow_dataflow.batches.binding import Batching
from astraflow_dataflow.dashboard.site import Dashboard
from astraflow_dataflow.episodes.archiving import Archives, Archiving
from astraflow_dataflow.episodes.holding import HeldPushes
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import Event
from astraflow_dataflow.run_loop import RunLoop
from astraflow_dataflow.runs import background
from astraflow_dataflow.runs.current_sessions import CurrentSessions
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.servicers.admin_servicer import AdminServicer
from astraflow_dataflow.servicers.batch_servicer import BatchServicer
from astraflow_dataflow.servicers.evaluation_servicer import EvaluationServicer
from astraflow_dataflow.servicers.run_servicer import RunServicer
from astraflow_dataflow.servicers.sample_servicer import SampleServicer
from astraflow_dataflow.servicers.scaler_servicer import ScalerServicer
from astraflow_dataflow.servicers.task_servicer import TaskServicer
from astraflow_dataflow.servicers.trajectory_servicer import TrajectoryServicer
from astraflow_dataflow.servicers.version_servicer import VersionServicer
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_dataflow.status.autoscaling import Autoscaler
from astraflow_dataflow.status.last_known import LastKnown
from astraflow_dataflow.status.redis_watch import RedisWatch
from astraflow_dataflow.status.reporting import Reporting
from astraflow_dataflow.status.step_history import StepHistory
from astraflow_dataflow.store.durability import Durability, choose_method
from astraflow_dataflow.store.homes.cluster import redis_at
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.payloads.holders import holder_of
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_dataflow.store.revoked_tokens import RevokedTokens
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.tasks.curation import Curation
from astraflow_dataflow.tasks.leasing import Leasing
from astraflow_dataflow.tasks.observing import Observing
from astraflow_dataflow.versions.announcements import Versions
from astraflow_dataflow.versions.grants import StoreGrants
from astraflow_dataflow.versions.snapshots import Snapshots
from astraflow_kit import lifecycle
from astraflow_kit.allocator import LARGEST_REUSED_BYTES, MMAP_THRESHOLD, TRIM_THRESHOLD, set_options
from astraflow_kit.clock import SystemClock
from astraflow_kit.identity.gate import caller
from astraflow_kit.identity.refusals import Refusals
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.pages import Pages
from astraflow_kit.rpc_contracts import Registration
from astraflow_kit.serve import GrpcServer

log = get_logger(__name__)

_KEPT_BYTES = 64 * 2**20
"""Freed memory that stays with the process."""
_LOOK_EVERY_S = 10.0
_LOOKS_AT_ONCE = 8
"""Runs whose plug-ins take long to be made are served without them after a while; others do not wait for that."""
_LOOK_AT_IDLE_EVERY_S = 60.0


@dataclass
class Dataflow:
    """Every part of one server process, wired."""

    settings: DataflowServerSettings
    metrics: Metrics
    connection: Redis
    store: Store
    registry: RunRegistry
    versions: Versions
    reporting: Reporting
    last_known: LastKnown
    settling: Settling
    durability: Durability
    grants: StoreGrants
    revoked_tokens: RevokedTokens
    archives: Archives
    refusals: Refusals

    @classmethod
    def assemble(cls, settings: DataflowServerSettings) -> Dataflow:
        """Wire the parts; nothing connects yet."""
        metrics = Metrics()
        connection = redis_of(settings)
        payloads = payloads_of(settings, connection)
        store = Store.over(connection, payloads)
        versions, redis_watch, refusals = Versions(store), RedisWatch(connection), Refusals()
        registry = RunRegistry(
            store,
            code_dir=settings.work_dir / "code",
            allow_code=settings.allow_recipe_code,
            limits=settings.plugin_limits,
        )
        reporting = Reporting(
            store=store,
            versions=versions,
            metrics=metrics,
            redis=redis_watch,
            steps=StepHistory(store.admin),
            refusals=refusals,
            trainer_lease_s=settings.batch_lease_s,
        )
        dataflow = cls(
            settings=settings,
            metrics=metrics,
            connection=connection,
            store=store,
            registry=registry,
            versions=versions,
            reporting=reporting,
            last_known=LastKnown(registry, reporting),
            settling=Settling(store, registry, metrics),
            durability=Durability(connection, settings.durability, payloads=payloads),
            grants=_grants(settings),
            revoked_tokens=RevokedTokens(connection),
            archives=Archives.over(settings.store, work_dir=settings.work_dir / "stores"),
            refusals=refusals,
        )
        dataflow.registry.on_loaded = dataflow.start_run_loop
        dataflow.registry.on_forgotten = dataflow.forget
        dataflow.durability.on_mark = dataflow.announce_durable
        dataflow.durability.on_loss = dataflow.registry.look_again
        return dataflow

    def start_run_loop(self, context: RunContext) -> None:
        """Start the background work of a run; called once per run and process."""
        run_loop = self.run_loop(context)
        context.tasks.append(background.start(run_loop.run, name="run_loop", run_id=context.run_id))
        observing = Observing(context, self.store)
        context.tasks.append(background.start(observing.run, name="observing", run_id=context.run_id))
        if (settings := context.recipe.raas.autoscaling) is not None:
            autoscaler = Autoscaler(context, self.store, settings)
            context.tasks.append(background.start(autoscaler.run, name="autoscaling", run_id=context.run_id))
        if context.recipe.dataflow.archive is not None:
            archiving = Archiving(context, self.store.archive, self.archives, self.metrics)
            context.tasks.append(background.start(archiving.run, name="archiving", run_id=context.run_id))

    def run_loop(self, context: RunContext) -> RunLoop:
        """Return what conducts a run; nothing runs yet."""
        return RunLoop(
            context=context,
            registry=self.registry,
            store=self.store,
            settling=self.settling,
            curation=Curation(self.store),
            snapshots=Snapshots(self.store),
            metrics=self.metrics,
            clock=SystemClock(),
            patience_s=self.settings.evaluation_patience_s,
        )

    def forget(self, run_id: str) -> None:
        """A run was deleted: drop what is remembered of it."""
        self.durability.forget(run_id)
        self.reporting.forget(run_id)
        self.last_known.forget(run_id)

    def announce_durable(self, run_id: str) -> None:
        """A run's watermark moved: its working sessions tell their nodes."""
        for context in self.registry.loaded():
            if context.run_id == run_id:
                context.wakeups.deliver(Event(topic="durable", fields={}))

    def registrations(self) -> list[Registration]:
        """The services with their servicers."""
        store, registry, versions, durability = self.store, self.registry, self.versions, self.durability
        runs = RunServicer(
            store, registry, versions, durability, self.grants, self.archives, self.settings.batch_lease_s
        )
        leasing, sessions = Leasing(store, self.metrics), CurrentSessions(store.nodes)
        tasks = TaskServicer(
            store, registry, leasing, sessions, versions, durability, self.settings.node_silence_s
        )
        ingest = Ingest(store, registry, self.settling, self.metrics, durability)
        batching = Batching(store, registry, self.settings.batch_lease_s)
        batches = BatchServicer(store, registry, batching, self.metrics, durability)
        return [
            (run_service_pb2_grpc.add_RunServiceServicer_to_server, runs),
            (task_service_pb2_grpc.add_TaskServiceServicer_to_server, tasks),
            (
                trajectory_service_pb2_grpc.add_TrajectoryServiceServicer_to_server,
                TrajectoryServicer(registry, HeldPushes(store, ingest, sessions, self.metrics), durability),
            ),
            (batch_service_pb2_grpc.add_BatchServiceServicer_to_server, batches),
            (
                version_service_pb2_grpc.add_VersionServiceServicer_to_server,
                VersionServicer(registry, versions, durability, self.grants),
            ),
            (
                evaluation_service_pb2_grpc.add_EvaluationServiceServicer_to_server,
                EvaluationServicer(store, registry, durability),
            ),
            (
                sample_service_pb2_grpc.add_SampleServiceServicer_to_server,
                SampleServicer(registry, self.archives),
            ),
            (
                admin_service_pb2_grpc.add_AdminServiceServicer_to_server,
                AdminServicer(
                    store,
                    registry,
                    self.reporting,
                    self.last_known,
                    durability,
                    self.revoked_tokens,
                    self.settings.capabilities,
                ),
            ),
        ]

    def scaler(self, *, ending: asyncio.Event) -> GrpcServer | None:
        """The listener that answers KEDA, where the settings have one; its streams end once `ending` is set."""
        if self.settings.scaler_port is None:
            return None
        servicer = ScalerServicer(self.registry, self.reporting, ending)
        added = [(external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server, servicer)]
        settings = self.settings.scaler
        return GrpcServer(added, settings=settings, metrics=self.metrics, port_setting="scaler_port")

    async def status(self) -> Mapping[str, object]:
        """What /status shows: the Status answer of every run that the caller may see, or why there is none."""
        run_ids = await self.last_known.run_ids()
        runs = {run_id: await self._status_of(run_id) for run_id in run_ids if caller().may_see(run_id)}
        return {"pid": os.getpid(), "runs": runs}

    async def _status_of(self, run_id: str) -> Mapping[str, object]:
        try:
            message = await self.last_known.status(run_id)
        except AstraflowError as error:
            return {"error": error.reason, "message": error.message}
        return MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )


class RunKeeper:
    """Connects to Redis and keeps the background work and gauges of every run going; a lifecycle `Service`."""

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow = dataflow
        self._stopped = asyncio.Event()
        self._following: list[asyncio.Task[None]] = []
        self._looked_s: dict[str, float] = {}

    async def start(self) -> None:
        """Connect, check Redis, load the functions and pick up the runs. Raises UnavailableError, IncompatibleError."""
        await self._dataflow.connection.open()
        try:
            await self._dataflow.store.payloads.open()
            await self._dataflow.durability.start()
            await self._dataflow.revoked_tokens.look()
        except AstraflowError:
            await self._dataflow.store.payloads.close()
            await self._dataflow.connection.close()
            raise
        await (
            self._look()
        )  # first: a mark is of no use where what it covers was lost before this process began
        follow = self._dataflow.revoked_tokens.follow
        self._dataflow.reporting.redis.on_looked = self._dataflow.reporting.export_redis
        self._following = [
            background.start(self._dataflow.durability.run, name="durability", run_id=""),
            background.start(follow, name="revoked_tokens", run_id=""),
            background.start(self._dataflow.reporting.redis.run, name="redis_watch", run_id=""),
        ]

    async def run(self) -> None:
        """Pick up runs that other processes create and refresh the gauges, until `stop`."""
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._stopped.wait()
            except TimeoutError:
                await self._look()

    async def stop(self, *, deadline_s: float) -> None:
        """End the background work and close the connections."""
        self._stopped.set()
        await self._dataflow.registry.close()
        for following in self._following:
            following.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await self._dataflow.store.payloads.close()
        await self._dataflow.connection.close()

    async def _look(self) -> None:
        try:
            run_ids = await self._dataflow.store.runs.ids()
            deleting = await self._dataflow.store.deletions.deleting()
            if payloads := await self._dataflow.store.payloads.look(run_ids):
                await self._dataflow.durability.see_payloads(payloads)
        except AstraflowError as error:
            log.warning("runs.not_listed", reason=error.reason, message=error.message)
            return
        for run_id in deleting:
            log.info("run.deletion_continued", run_id=run_id)
            await self._do(run_id, self._dataflow.store.deletions.delete_keys(run_id))
        for first in range(0, len(run_ids), _LOOKS_AT_ONCE):
            await asyncio.gather(*map(self._look_at, run_ids[first : first + _LOOKS_AT_ONCE]))

    async def _look_at(self, run_id: str) -> None:
        known, now_s = self._dataflow.registry.known(run_id), time.monotonic()
        if known and known.is_idle and now_s < self._looked_s.get(run_id, -math.inf) + _LOOK_AT_IDLE_EVERY_S:
            return
        self._looked_s[run_id] = now_s
        await self._do(run_id, self._keep(run_id))

    async def _keep(self, run_id: str) -> None:
        try:
            await self._dataflow.store.payloads.remove_ended(run_id)
            await self._dataflow.last_known.status(run_id)
            await self._dataflow.reporting.recount_large(await self._dataflow.registry.get(run_id))
        except NotFoundError:
            await self._dataflow.store.deletions.mend(run_id)

    async def _do(self, run_id: str, work: Awaitable[object]) -> None:
        """One run that cannot be served here (code that is not allowed, say) must not hide the others."""
        try:
            await work
        except AstraflowError as error:
            log.warning("run.not_served", run_id=run_id, reason=error.reason, message=error.message)


def run(settings: DataflowServerSettings) -> int:
    """Serve until told to stop; the exit code for `sys.exit`."""
    # Payloads come and go by the megabyte: memory given back to the system is zeroed and mapped again for each.
    set_options((MMAP_THRESHOLD, LARGEST_REUSED_BYTES), (TRIM_THRESHOLD, _KEPT_BYTES))
    return lifecycle.run(lambda life: serve(settings, life), drain_timeout_s=settings.drain_timeout_s)


async def serve(settings: DataflowServerSettings, life: lifecycle.Lifecycle) -> None:
    """Serve until the lifecycle drains."""
    dataflow = Dataflow.assemble(settings)
    keeper = RunKeeper(dataflow)
    registrations = dataflow.registrations()
    pages = Pages(
        settings,
        life=life,
        metrics=dataflow.metrics,
        status=dataflow.status,
        readiness={"redis": dataflow.connection.ready},
        revoked=dataflow.revoked_tokens.seen,
        site=Dashboard(
            registrations, registry=dataflow.registry, archives=dataflow.archives, ending=life.drain
        ),
    )
    grpc_server = GrpcServer(
        registrations,
        settings=settings,
        metrics=dataflow.metrics,
        refusals=dataflow.refusals,
        session_keys=dataflow.registry,
        revoked=dataflow.revoked_tokens.seen,
        share_port=settings.share_port,
    )
    scaler = dataflow.scaler(ending=life.drain)

    def announce() -> None:
        addresses = lifecycle.Addresses(
            grpc=grpc_server.address,
            http=pages.address,
            probe=pages.probe_address,
            scaler=scaler.address if scaler else "",
        )
        lifecycle.write_address_file(settings.address_file, addresses)
        # What starting has loaded stays: to look through it for garbage holds all calls up.
        gc.freeze()
        log.info("dataflow.ready", grpc=addresses.grpc, http=addresses.http)

    services: list[lifecycle.Service] = [keeper, pages, grpc_server, *([scaler] if scaler else [])]
    await lifecycle.run_services(services, lifecycle=life, on_started=announce)


def redis_of(settings: DataflowServerSettings) -> Redis:
    """The Redis, or cluster, of the settings, not open yet."""
    return redis_at(
        settings.redis, password_file=settings.redis_password_file, allow_volatile=settings.allow_volatile
    )


def payloads_of(settings: DataflowServerSettings, connection: Redis) -> Payloads:
    """The payloads of runs, where the settings say that they are."""
    holder = holder_of(
        settings.payloads,
        password_file=settings.payloads_password_file,
        allow_volatile=settings.allow_volatile,
        store=settings.store,
    )
    return Payloads(connection, holder)


def _grants(settings: DataflowServerSettings) -> StoreGrants:
    life_s = settings.store_grant_life_s
    return (
        StoreGrants.over(settings.store, life_s=life_s)
        if settings.store_grants
        else StoreGrants(None, life_s=life_s)
    )


async def check(settings: DataflowServerSettings) -> dict[str, str]:
    """What `--check` reports: the parts that were tried and what they said.

    Raises the typed error of a part that fails.
    """
    _grants(settings)
    connection = redis_of(settings)
    async with connection:
        payloads = payloads_of(settings, connection)
        await payloads.open()
        methods = {(await choose_method(each, settings.durability)).value for each in connection.primaries}
        if payloads.redis is not None:
            await choose_method(payloads.redis, settings.durability)
        await payloads.close()
        runs = await Store.over(connection).runs.ids()
        incarnation = await connection.data_incarnation()
    return {
        "redis": "usable",
        "data": incarnation,
        "durability": ", ".join(sorted(methods)),
        "payloads": f"usable, at {payloads.address}" if payloads.address else "in the same Redis",
        "runs": ", ".join(runs) or "none yet",
    }

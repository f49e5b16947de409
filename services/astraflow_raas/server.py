"""Starting a node and keeping it until it drains.

Invariant: nothing is leased before recipe, code, weights and engine are in place, and the process ends only
after its last finished episode was pushed or its drain ran out of time. `__main__` calls `run` and `check`.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from google.protobuf.json_format import MessageToDict

from astraflow.client import AsyncClient
from astraflow.errors import AstraflowError, UnavailableError
from astraflow.raas.v1 import node_service_pb2_grpc
from astraflow_kit import failpoints, lifecycle
from astraflow_kit.http import ReadinessCheck
from astraflow_kit.identity.tokens import ALL, nodes_said_by
from astraflow_kit.lifecycle import Addresses, Lifecycle, Service
from astraflow_kit.log import bind, get_logger
from astraflow_kit.making import Making
from astraflow_kit.metrics import Metrics
from astraflow_kit.pages import Pages
from astraflow_kit.rpc_contracts import Registration
from astraflow_kit.serve import GrpcServer
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.engine.command import require_engine
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.loops import LoopService
from astraflow_raas.node.assembly import NodeInputs, assemble_node, gpus_of, require_recorded_experts
from astraflow_raas.node.folder import NodeFolder, claim_folder
from astraflow_raas.node.hardware import describe_hardware
from astraflow_raas.node.joining import FoundRun, find_run, join_request, join_run
from astraflow_raas.node.made_in_session import made_in_session
from astraflow_raas.node.mirror_folders import MirrorFolders
from astraflow_raas.node.node import Node
from astraflow_raas.policies.granted_store import granted_store
from astraflow_raas.recipe_code import RecipeWorkflow, load_workflow
from astraflow_raas.servicers.node_service import NodeServicer, node_status
from astraflow_raas.settings import NodeSettings
from astraflow_raas.timeline import Stage, Timeline, process_age_s
from astraflow_weights.store import open_store

log = get_logger(__name__)

_CHECK_PATIENCE_S = 5.0
_WATCH_EVERY_S = 1.0
_LOG_EVERY_S = 30.0
RUN_FINISHED = "run_finished"


def run(settings: NodeSettings) -> int:
    """Run the node until it drains; the exit code for `sys.exit`."""
    return lifecycle.run(partial(serve, settings), drain_timeout_s=settings.drain_timeout_s)


async def serve(settings: NodeSettings, life: Lifecycle) -> None:
    """Join, serve, drain. Ends at once when a stop is requested before it has joined."""
    async with _claimed(settings) as folder, _client(settings) as client:
        bind(node_id=folder.node_id)
        mirrors = MirrorFolders(folder, root=settings.mirror_dir)
        joining = asyncio.ensure_future(_join(settings, client, folder=folder, mirrors=mirrors, life=life))
        stopping = asyncio.ensure_future(life.drain.wait())
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            await asyncio.wait((joining,))
            return
        node, metrics = joining.result()
        try:
            await _serve_node(node, settings=settings, life=life, metrics=metrics)
        finally:
            await node.session.close()
            await asyncio.to_thread(mirrors.close)


async def check(settings: NodeSettings) -> Mapping[str, str]:
    """Find the run, load its plug-ins, open its store; what was found, for people. Changes nothing in the
    run.

    Raises the error that would stop the node.
    """
    async with _claimed(settings) as folder, _client(settings) as client:
        await require_engine(settings.engine, python=settings.engine_python)
        found = await find_run(client, settings.run_id, patience_s=_CHECK_PATIENCE_S)
        gpus_of(settings, found.recipe.engine_policies)
        require_recorded_experts(settings, found.recipe)
        served = ServedEnvironments(settings.environment_connections)
        await _making(found, settings, folder=folder, endpoint=Endpoint(), served=served).made_beside()
        store = await asyncio.to_thread(open_store, found.run.store_uri, settings=settings.store)
    return {
        "run": found.run.run_id,
        "node": folder.node_id,
        "workflow": ", ".join(dict.fromkeys(way.workflow.use for way in found.recipe.grading.values())),
        "reward": ", ".join(
            dict.fromkeys(way.reward.use if way.reward else "none" for way in found.recipe.grading.values())
        ),
        "policies": ", ".join(found.recipe.policies),
        "store": store.uri,
        "engine": settings.engine,
        "folder": str(folder.path),
    }


async def _join(
    settings: NodeSettings,
    client: AsyncClient,
    *,
    folder: NodeFolder,
    mirrors: MirrorFolders,
    life: Lifecycle,
) -> tuple[Node, Metrics]:
    metrics = Metrics()
    timeline = Timeline(metrics=metrics, age_s=process_age_s())
    await require_engine(settings.engine, python=settings.engine_python)
    found = await find_run(client, settings.run_id, patience_s=settings.join_timeout_s)
    bind(run_id=found.run.run_id)
    # Everything that can be refused is tried before the server counts on this node.
    gpus_of(settings, found.recipe.engine_policies)
    require_recorded_experts(settings, found.recipe)
    endpoint, served = Endpoint(metrics), ServedEnvironments(settings.environment_connections)
    request = join_request(
        found,
        settings,
        node_id=folder.node_id,
        hardware=await asyncio.to_thread(describe_hardware, settings),
    )
    patience = {"patience_s": settings.join_timeout_s, "name_patience_s": settings.name_patience_s}
    join = partial(join_run, client, request, folder=folder, **patience)
    making = _making(found, settings, folder=folder, endpoint=endpoint, served=served)
    workflow, joined = await made_in_session(
        making, client=client, request=request, join=join, metrics=metrics
    )
    store = await asyncio.to_thread(open_store, found.run.store_uri, settings=settings.store)
    joined = joined or await join()
    served.speak_as(joined.session)
    store = granted_store(joined, store, client=client, settings=settings.store)
    timeline.mark(Stage.JOINED)
    failpoints.hit("raas.joined")
    await asyncio.to_thread(mirrors.remove_stale, request.run_id)
    inputs = NodeInputs(
        found=found,
        request=request,
        joined=joined,
        client=client,
        workflow=workflow,
        endpoint=endpoint,
        served=served,
        settings=settings,
        metrics=metrics,
        timeline=timeline,
        drain_requested=partial(_drain_requested, settings=settings, mirrors=mirrors, life=life),
    )
    return await assemble_node(inputs, store=store, folder=folder, mirrors=mirrors), metrics


def _making(
    found: FoundRun,
    settings: NodeSettings,
    *,
    folder: NodeFolder,
    endpoint: Endpoint,
    served: ServedEnvironments,
) -> Making[RecipeWorkflow]:
    """Begin to make the recipe's workflow and rewards."""
    work = partial(
        load_workflow,
        found.run,
        found.recipe,
        into=folder.code,
        scratch=folder.scratch,
        allowed=settings.allow_recipe_code,
        endpoint=endpoint,
        served=served,
        secrets=settings.secret_paths,
    )
    return Making(work, settings.making)


def _drain_requested(reason: str, *, settings: NodeSettings, mirrors: MirrorFolders, life: Lifecycle) -> None:
    if settings.stay and reason == RUN_FINISHED:
        log.info("node.stays", reason=reason)
        return
    mirrors.run_is_over = reason == RUN_FINISHED
    life.begin_drain()


async def _serve_node(node: Node, *, settings: NodeSettings, life: Lifecycle, metrics: Metrics) -> None:
    grpc_server = GrpcServer(
        registrations_of(node, begin_drain=life.begin_drain),
        settings=settings,
        metrics=metrics,
        run_id=node.run_id,
    )

    async def status() -> Mapping[str, object]:
        return MessageToDict(
            node_status(node), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    pages = Pages(
        settings,
        life=life,
        metrics=metrics,
        status=status,
        readiness=_readiness(node),
        run_id=node.run_id,
    )

    def publish() -> None:
        addresses = Addresses(grpc=grpc_server.address, http=pages.address, probe=pages.probe_address)
        lifecycle.write_address_file(settings.address_file, addresses)
        log.info("node.started", grpc=addresses.grpc, http=addresses.http)

    watch = _Watch(
        node,
        metrics,
        server=settings.connection.address,
        server_gone_timeout_s=settings.server_gone_timeout_s,
    )
    services: list[Service] = [pages, grpc_server, watch, *node.services]
    await lifecycle.run_services(services, lifecycle=life, on_started=publish)


def registrations_of(node: Node, *, begin_drain: Callable[[], None]) -> list[Registration]:
    """The services of a node."""
    add_node = node_service_pb2_grpc.add_NodeServiceServicer_to_server
    return [(add_node, NodeServicer(node, begin_drain=begin_drain))]


def _readiness(node: Node) -> Mapping[str, ReadinessCheck]:
    async def session() -> str | None:
        return None if node.worker.connected else "no working session with the dataflow server"

    async def policies() -> str | None:
        waiting_for = node.policies.waiting_for
        return f"waiting for {waiting_for}" if waiting_for else None

    return {"session": session, "policies": policies}


class _Watch(LoopService):
    """Keeps the gauges up to date, and the log true about what the node waits for and since when; ends a node whose
    server does not come back."""

    def __init__(self, node: Node, metrics: Metrics, *, server: str, server_gone_timeout_s: float) -> None:
        super().__init__()
        self._node = node
        self._metrics = metrics
        self._server = server
        self._server_gone_timeout_s = server_gone_timeout_s
        self._waiting_for = ""
        self._since_s = 0.0
        self._log_next_s = 0.0

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._node.publish_gauges(self._metrics)
            self._look(loop.time())
            await asyncio.sleep(_WATCH_EVERY_S)

    def _look(self, now_s: float) -> None:
        waiting_for = self._node.waiting_for
        if waiting_for != self._waiting_for:
            self._waiting_for, self._since_s, self._log_next_s = waiting_for, now_s, now_s
            if not waiting_for:
                log.info("node.works")
                if not gc.get_freeze_count():
                    # What starting has loaded stays: to look through it for garbage would hold the loop for 0.1 s.
                    gc.freeze()
        if waiting_for in ("server", "token") and 0 < self._server_gone_timeout_s <= now_s - self._since_s:
            raise self._given_up(now_s - self._since_s)
        if waiting_for and now_s >= self._log_next_s:
            self._log_next_s = now_s + _LOG_EVERY_S
            log.info(
                "node.waits",
                waiting_for=waiting_for,
                since_s=round(now_s - self._since_s, 1),
                leases=self._node.worker.num_held,
                episodes_kept=self._node.pusher.num_kept,
            )

    def _given_up(self, waited_s: float) -> AstraflowError:
        refusal, num_kept = self._node.worker.refusal, self._node.pusher.num_kept
        kept = f"{num_kept} episodes are kept on disk for the node's next start"
        if refusal is not None:
            return type(refusal)(
                f"{self._server} has refused the token for {waited_s:.0f} s: {refusal.message}; {kept}"
            )
        return UnavailableError(
            f"no dataflow server at {self._server} for {waited_s:.0f} s; {kept}; raise --server-gone-timeout-s (0: "
            "wait for ever) when it may be away longer"
        )


@asynccontextmanager
async def _claimed(settings: NodeSettings) -> AsyncIterator[NodeFolder]:
    granted = (ALL,) if settings.node_id else nodes_said_by(settings.connection.current_token())
    folder = await asyncio.to_thread(
        claim_folder, settings.work_dir, node_id=settings.node_id, granted=granted
    )
    try:
        yield folder
    finally:
        folder.release()


def _client(settings: NodeSettings) -> AsyncClient:
    return AsyncClient(settings.connection)

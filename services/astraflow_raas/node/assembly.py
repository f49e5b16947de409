"""Making the parts of a node from a recipe and settings.

Invariant: this is the only place that knows which implementation stands behind each seam (mirror, child
process or remote engine); the parts get finished values. Called once by `server`, after the server has
accepted the node.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Workflow
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.command import EngineCommand
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.process import EngineProcess, start_engine
from astraflow_raas.node.engine_host import ChildHost, HostSettings, RemoteHost
from astraflow_raas.node.folder import NodeFolder
from astraflow_raas.node.joining import FoundRun
from astraflow_raas.node.mirror_place import MirrorPlace
from astraflow_raas.node.node import Node, NodeState, PolicyParts, PolicyTable
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_raas.push.journal import PushJournal
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.push.spool import SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles
from astraflow_raas.settings import NodeSettings
from astraflow_raas.timeline import Timeline
from astraflow_raas.work.session import Session, SessionSettings
from astraflow_raas.work.worker import Membership, Worker, WorkerHooks
from astraflow_weights.mirror.lock import Hold
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog

_MAX_ENGINE_SLOTS = 1024


async def assemble_node(
    found: FoundRun,
    joined: run_service_pb2.JoinRunResponse,
    *,
    membership: Membership,
    workflow: Workflow,
    store: ObjectStore,
    client: AsyncClient,
    settings: NodeSettings,
    folder: NodeFolder,
    place: MirrorPlace,
    metrics: Metrics,
    timeline: Timeline,
    told_to_drain: Callable[[str], None],
) -> Node:
    """Return the node, not started. Raises MirrorMismatch, InvalidArgumentError."""
    maker = _PolicyMaker(
        found,
        store=store,
        membership=membership,
        settings=settings,
        folder=folder,
        place=place,
        metrics=metrics,
        timeline=timeline,
    )
    policies = PolicyTable({name: await maker.make(name) for name in found.recipe.policies})
    limits = SpoolLimits(max_episodes=settings.spool_episodes, max_bytes=settings.spool_bytes)
    files = SpoolFiles(folder.spool(membership.run_id))
    journal = PushJournal(folder.push_journal if settings.push_journal else None)
    pusher = Pusher(client, metrics=metrics, limits=limits, files=files, journal=journal)
    session = Session(
        workflow,
        policies={name: part.policy for name, part in policies.parts.items()},
        pusher=pusher,
        settings=SessionSettings(
            node_id=membership.node_id,
            episode_timeout_s=found.recipe.raas.episode_timeout_s,
            coalesce_max_new_tokens=settings.coalesce_max_new_tokens,
            sampling=found.sampling,
        ),
        metrics=metrics,
    )
    state = NodeState(policies=policies, pusher=pusher)
    worker = Worker(
        client,
        membership,
        joined=joined,
        runner=session,
        state=state,
        hooks=WorkerHooks(
            announce=policies.announce,
            data_lost=pusher.push_recent_again,
            durable=pusher.durable,
            drained_by_server=told_to_drain,
            reached=timeline.mark,
        ),
        metrics=metrics,
    )
    state.tell_changes_to(worker.state_changed)
    for version in joined.versions:
        policies.announce(version)
    return Node(
        run_id=membership.run_id,
        node_id=membership.node_id,
        policies=policies,
        session=session,
        pusher=pusher,
        worker=worker,
    )


class _PolicyMaker:
    """Makes what serves one policy after the other."""

    def __init__(
        self,
        found: FoundRun,
        *,
        store: ObjectStore,
        membership: Membership,
        settings: NodeSettings,
        folder: NodeFolder,
        place: MirrorPlace,
        metrics: Metrics,
        timeline: Timeline,
    ) -> None:
        self._timeline = timeline
        self._found = found
        self._store = store
        self._membership = membership
        self._settings = settings
        self._folder = folder
        self._place = place
        self._metrics = metrics
        self._host_settings = HostSettings(
            start_timeout_s=settings.engine_start_timeout_s,
            stall_s=settings.engine_stall_s,
            first_backoff_s=settings.engine_restart_backoff_s,
        )

    async def make(self, name: str) -> PolicyParts:
        policy = ServedPolicy(name, timeline=self._timeline)
        weights = WeightSync(
            policy,
            source=await asyncio.to_thread(self._source, name),
            metrics=self._metrics,
            evaluation_hold_s=self._settings.evaluation_hold_s,
        )
        return PolicyParts(policy=policy, weights=weights, host=self._host(policy, weights))

    def _source(self, name: str) -> MirrorSource:
        run_id = self._found.run.run_id
        found = self._place.find(run_id, name)

        def open_mirror(model_bytes: int) -> Mirror:
            return Mirror(self._place.choose(run_id, name, model_bytes=model_bytes))

        log_reader = VersionLog(self._store, run_id=run_id, policy_id=name)
        return MirrorSource(
            self._store,
            log_reader=log_reader,
            mirror=Mirror(found) if found is not None else None,
            open_mirror=open_mirror,
        )

    def _host(self, policy: ServedPolicy, weights: WeightSync) -> ChildHost | RemoteHost:
        if "://" in self._settings.engine:
            return RemoteHost(
                policy, weights, connect=self._connect, settings=self._host_settings, metrics=self._metrics
            )
        return ChildHost(
            policy,
            weights,
            launch=self._launcher(policy.policy_id),
            settings=self._host_settings,
            metrics=self._metrics,
        )

    def _connect(self) -> HttpEngine:
        if len(self._found.recipe.policies) > 1:
            raise InvalidArgumentError(
                f"engine {self._settings.engine} serves one model, the run has the policies "
                f"{', '.join(self._found.recipe.policies)}; let the node start its engines itself: --engine "
                "astraflow_engine or sglang"
            )
        return HttpEngine(self._settings.engine, request_timeout_s=self._settings.engine_request_timeout_s)

    def _launcher(self, name: str) -> Callable[[Hold], "asyncio.Future[EngineProcess]"]:
        group_size = self._found.recipe.dataflow.group_size
        command = EngineCommand(
            kind=self._settings.engine,
            python=self._settings.engine_python or Path(sys.executable),
            extra_args=self._settings.engine_args,
            max_running_requests=min(_MAX_ENGINE_SLOTS, self._membership.max_concurrent_tasks * group_size),
            num_threads=self._settings.engine_threads,
            seed=self._found.recipe.run.seed,
        )

        def launch(held: Hold) -> "asyncio.Future[EngineProcess]":
            return asyncio.ensure_future(
                start_engine(
                    command,
                    model_dir=held.directory,
                    version=held.version,
                    log_path=self._folder.engine_log(name),
                    request_timeout_s=self._settings.engine_request_timeout_s,
                )
            )

        return launch

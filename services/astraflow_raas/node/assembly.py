"""Making the parts of a node from a recipe and settings.

Invariant: this is the only place that knows which implementation stands behind each seam (mirror, child
process or remote engine); the parts get finished values. Called once by `server`, after the server has
accepted the node.
"""

import asyncio
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2
from astraflow.errors import InvalidArgumentError
from astraflow.recipe import Recipe
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.engine.base import PauseMode
from astraflow_raas.engine.changed_elements import ChangedOrders
from astraflow_raas.engine.command import EngineCommand, share_gpus
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.process import start_engine
from astraflow_raas.engine.replicas import Replica
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.node.engine_host import AdapterHost, ChildHost, HostSettings, Launch, RemoteHost
from astraflow_raas.node.folder import NodeFolder
from astraflow_raas.node.hardware import require_gpus
from astraflow_raas.node.joining import FoundRun
from astraflow_raas.node.load_watch import LoadWatch
from astraflow_raas.node.mirror_folders import MirrorFolders
from astraflow_raas.node.node import Node, PolicyParts, PolicyTable, node_state
from astraflow_raas.policies.external_model import ExternalModel, endpoints_of
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_raas.push.journal import PushJournal
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.push.spool import SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles
from astraflow_raas.recipe_code import RecipeWorkflow
from astraflow_raas.settings import EMBEDDED_ENGINE, SGLANG_ENGINE, NodeSettings
from astraflow_raas.timeline import Timeline
from astraflow_raas.work.expert_records import ExpertBlobs
from astraflow_raas.work.session import Session, SessionSettings
from astraflow_raas.work.worker import Worker, WorkerHooks
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog

_MAX_ENGINE_SLOTS = 1024
_ENGINE_PATIENCE_S = 5.0
"""How long an episode keeps its place while a policy has no engine and others could use the place."""
_STALLS_PER_EPISODE = 4


@dataclass(frozen=True, kw_only=True)
class NodeInputs:
    """What a joined node is made from."""

    found: FoundRun
    request: run_service_pb2.JoinRunRequest
    joined: run_service_pb2.JoinRunResponse
    client: AsyncClient
    workflow: RecipeWorkflow
    endpoint: Endpoint
    served: ServedEnvironments
    settings: NodeSettings
    metrics: Metrics
    timeline: Timeline
    drain_requested: Callable[[str], None]
    """Called with the reason when the server asks the node to drain."""


async def assemble_node(
    inputs: NodeInputs, *, store: ObjectStore, folder: NodeFolder, mirrors: MirrorFolders
) -> Node:
    """Return the node, not started. Raises MirrorMismatch, InvalidArgumentError."""
    maker = _PolicyMaker(inputs, store=store, folder=folder, mirrors=mirrors)
    names = inputs.found.recipe.served_policies
    adapters, parts = inputs.found.recipe.adapters, dict[str, PolicyParts]()
    for name in sorted(names, key=lambda name: name in adapters):  # an adapter finds its base
        base = parts[adapters[name].of].policy if name in adapters else None
        parts[name] = await maker.make(name, base=base)
    policies = PolicyTable({name: parts[name] for name in names}, spared=spared_policies(inputs))
    experts = await asyncio.to_thread(_expert_blobs, inputs, store)
    settings = inputs.settings
    pusher = Pusher(
        inputs.client,
        metrics=inputs.metrics,
        limits=SpoolLimits(max_episodes=settings.spool_episodes, max_bytes=settings.spool_bytes),
        files=SpoolFiles(folder.spool(inputs.request.run_id)),
        journal=PushJournal(folder.push_journal if settings.push_journal else None),
    )
    return connect_node(inputs, policies=policies, pusher=pusher, experts=experts)


def _expert_blobs(inputs: NodeInputs, store: ObjectStore) -> ExpertBlobs | None:
    """Where recorded experts go; None where the recipe records none. Raises StoreRefused."""
    if not inputs.found.recipe.recorded_policies:
        return None
    run = inputs.found.run
    blobs = ExpertBlobs(store, store_uri=run.store_uri, run_id=run.run_id, metrics=inputs.metrics)
    blobs.require_writable()
    return blobs


def spared_policies(inputs: NodeInputs) -> frozenset[str]:
    """Policies without which the run's tasks may be leased: those that play trained roles only, under `admit: any`."""
    roles = inputs.workflow.roles.values()
    if inputs.found.recipe.dataflow.admit == "all":
        return frozenset()
    asked = {role.policy_id for role in roles if not role.is_trained}
    return frozenset(role.policy_id for role in roles) - asked


def connect_node(
    inputs: NodeInputs, *, policies: PolicyTable, pusher: Pusher, experts: ExpertBlobs | None = None
) -> Node:
    """Put a node together from its policies and its pusher, and let them hear of what was announced already."""
    session = _session(inputs, policies, pusher, experts)
    load = _load_watch(inputs, policies, session)
    worker = _worker(inputs, policies, pusher, session, load)
    load.on_change = worker.state_changed
    for part in policies.parts.values():
        part.policy.on_change = worker.state_changed
    pusher.on_change = worker.state_changed
    for version in inputs.joined.versions:
        policies.announce(version)
    return Node(
        run_id=inputs.request.run_id,
        node_id=inputs.request.node_id,
        policies=policies,
        endpoint=inputs.endpoint,
        served=inputs.served,
        scorers=inputs.workflow.own_scorers,
        session=session,
        pusher=pusher,
        load=load,
        worker=worker,
    )


def _session(
    inputs: NodeInputs, policies: PolicyTable, pusher: Pusher, experts: ExpertBlobs | None
) -> Session:
    settings = SessionSettings(
        node_id=inputs.request.node_id,
        episode_timeout_s=inputs.found.recipe.raas.episode_timeout_s,
        coalesce_max_new_tokens=inputs.settings.coalesce_max_new_tokens,
        sampling=inputs.found.sampling,
        roles=inputs.workflow.roles,
        row_limits=inputs.found.recipe.row_limits,
        snapshots=inputs.found.recipe.snapshots,
        swap_seats=inputs.found.recipe.raas.swap_seats,
        run_identity=inputs.found.run.identity,
    )
    served = {name: part.policy for name, part in policies.parts.items()}
    workflow = inputs.workflow.workflow
    return Session(
        workflow,
        policies=served,
        externals=_externals(inputs),
        pusher=pusher,
        settings=settings,
        metrics=inputs.metrics,
        experts=experts,
    )


def _externals(inputs: NodeInputs) -> dict[str, ExternalModel]:
    """The policies that are endpoints elsewhere; a node without the endpoint of one refuses tasks that ask it."""
    endpoints, found = endpoints_of(inputs.settings), {}
    for policy_id, policy in inputs.found.recipe.resolved_policies.items():
        external = policy.model.external
        if external is not None:
            endpoint = endpoints.get(policy_id)
            found[policy_id] = ExternalModel(policy_id, external, endpoint=endpoint, metrics=inputs.metrics)
    return found


def _load_watch(inputs: NodeInputs, policies: PolicyTable, session: Session) -> LoadWatch:
    recipe = inputs.found.recipe
    return LoadWatch(
        {name: part.policy for name, part in policies.parts.items()},
        episodes=lambda: session.num_running,
        most_episodes=inputs.request.max_concurrent_tasks,
        group_size=recipe.dataflow.group_size,
        episode_timeout_s=recipe.raas.episode_timeout_s,
    )


def _worker(
    inputs: NodeInputs, policies: PolicyTable, pusher: Pusher, session: Session, load: LoadWatch
) -> Worker:
    hooks = WorkerHooks(
        announce=policies.announce,
        data_lost=pusher.push_recent_again,
        durable=pusher.durable,
        drain_requested=inputs.drain_requested,
        reached=inputs.timeline.mark,
    )
    return Worker(
        inputs.client,
        inputs.request,
        joined=inputs.joined,
        group_size=inputs.found.recipe.dataflow.group_size,
        runner=session,
        state=lambda: node_state(policies, pusher, load),
        hooks=hooks,
        metrics=inputs.metrics,
        server_silence_s=inputs.settings.server_silence_s,
    )


def require_recorded_experts(settings: NodeSettings, recipe: Recipe) -> None:
    """Refuse an engine of which is known beforehand that it has no experts. Raises InvalidArgumentError."""
    if recipe.recorded_policies and settings.engine == EMBEDDED_ENGINE:
        raise InvalidArgumentError(
            f"trainer.router_replay of policy {', '.join(sorted(recipe.recorded_policies))} needs an engine that says "
            "which experts tokens went to, and the CPU engine serves dense models; give --engine sglang, or leave "
            "router_replay out of the recipe"
        )


def gpus_of(settings: NodeSettings, policies: Iterable[str]) -> dict[str, list[tuple[int, ...]]]:
    """The GPUs of each engine of each policy; empty where the engine chooses. Raises InvalidArgumentError."""
    gpus = [int(number) for number in settings.engine_gpus.split(",") if number]
    if gpus and settings.engine != SGLANG_ENGINE:
        raise InvalidArgumentError(
            f"--engine-gpus is for --engine {SGLANG_ENGINE}, which this node starts itself; the engine is "
            f"{settings.engine}"
        )
    require_gpus(gpus)
    return share_gpus(gpus, settings.engines_of(policies), tp_size=settings.engine_tp_size)


class _PolicyMaker:
    """Makes what serves one policy after the other."""

    def __init__(
        self, inputs: NodeInputs, *, store: ObjectStore, folder: NodeFolder, mirrors: MirrorFolders
    ) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._store = store
        self._folder = folder
        self._mirrors = mirrors
        self._gpus = gpus_of(self._settings, inputs.found.recipe.engine_policies)

    async def make(self, name: str, *, base: ServedPolicy | None) -> PolicyParts:
        """What serves a policy; `base` is the one whose engines serve it, where it has none of its own."""
        policies = self._inputs.found.recipe.served_policies
        policy = ServedPolicy(
            name,
            num_engines=len(base.engines) if base else len(self._gpus[name]),
            timeline=self._inputs.timeline,
            patience_s=math.inf if len(policies) == 1 else _ENGINE_PATIENCE_S,
            records_experts=name in self._inputs.found.recipe.recorded_policies,
        )
        weights = WeightSync(
            policy,
            source=await asyncio.to_thread(self._source, name),
            metrics=self._inputs.metrics,
            evaluation_hold_s=self._settings.evaluation_hold_s,
            running=PauseMode(self._inputs.found.recipe.raas.swap),
        )
        hosts: list[ChildHost | RemoteHost | AdapterHost] = []
        for index, replica in enumerate(policy.engines):
            if base is None:
                hosts.append(self._host(policy, weights, replica, self._gpus[name][index]))
            else:
                hosts.append(self._adapter_host(policy, weights, replica, base=base.engines[index]))
        return PolicyParts(policy=policy, weights=weights, hosts=hosts)

    def _source(self, name: str) -> MirrorSource:
        run_id = self._inputs.request.run_id
        found = self._mirrors.find(run_id, name)

        mirrors = MirrorSettings(
            fetch_threads=self._settings.fetch_threads,
            apply_threads=self._settings.apply_threads,
            record_changes=self._loads_changes,
        )

        def open_mirror(model_bytes: int) -> Mirror:
            return Mirror(self._mirrors.choose(run_id, name, model_bytes=model_bytes), settings=mirrors)

        snapshot = self._inputs.found.recipe.snapshots.get(name)
        return MirrorSource(
            self._store,
            log_reader=VersionLog(self._store, run_id=run_id, policy_id=snapshot.of if snapshot else name),
            mirror=Mirror(found, settings=mirrors) if found is not None else None,
            open_mirror=open_mirror,
        )

    def _host(
        self, policy: ServedPolicy, weights: WeightSync, replica: Replica, gpus: tuple[int, ...]
    ) -> ChildHost | RemoteHost:
        settings, metrics = self._host_settings, self._inputs.metrics
        if "://" in self._settings.engine:
            return RemoteHost(
                policy, weights, self._connect, replica=replica, settings=settings, metrics=metrics
            )
        launch = self._launch(policy.policy_id, number=replica.number, gpus=gpus)
        return ChildHost(policy, weights, launch, replica=replica, settings=settings, metrics=metrics)

    def _adapter_host(
        self, policy: ServedPolicy, weights: WeightSync, replica: Replica, *, base: Replica
    ) -> AdapterHost:
        return AdapterHost(
            policy,
            weights,
            base,
            replica=replica,
            settings=self._host_settings,
            metrics=self._inputs.metrics,
        )

    @property
    def _host_settings(self) -> HostSettings:
        return HostSettings(
            start_timeout_s=self._settings.engine_start_timeout_s,
            stall_s=self._stall_s,
            first_backoff_s=self._settings.engine_restart_backoff_s,
        )

    @property
    def _stall_s(self) -> float:
        """Seconds without a sign of life after which an engine counts as hung."""
        episode_timeout_s = self._inputs.found.recipe.raas.episode_timeout_s
        return min(self._settings.engine_stall_s, episode_timeout_s / _STALLS_PER_EPISODE)

    def _connect(self) -> HttpEngine:
        policies = self._inputs.found.recipe.engine_policies
        if len(policies) > 1:
            raise InvalidArgumentError(
                f"engine {self._settings.engine} serves one model, the run has the policies "
                f"{', '.join(policies)}; let the node start its engines itself: --engine "
                "astraflow_engine or sglang"
            )
        return self._engine_at(self._settings.engine, records_experts=self._records_experts(*policies))

    def _records_experts(self, name: str) -> bool:
        """Whether the engine of a policy is asked for experts: for itself, or for an adapter of it."""
        recipe = self._inputs.found.recipe
        asked = {name, *(adapter for adapter, lora in recipe.adapters.items() if lora.of == name)}
        return bool(asked & recipe.recorded_policies)

    @property
    def _loads_changes(self) -> bool:
        return self._settings.engine_update == "changed" and self._settings.engine == SGLANG_ENGINE

    def _engine_at(
        self,
        base_url: str,
        *,
        orders: ChangedOrders | None = None,
        api_key: str = "",
        records_experts: bool = False,
    ) -> HttpEngine:
        return HttpEngine(
            base_url,
            orders=orders,
            api_key=api_key,
            records_experts=records_experts,
            request_timeout_s=self._settings.engine_request_timeout_s,
            swap_timeout_s=self._settings.engine_swap_timeout_s,
            control_timeout_s=self._stall_s,
        )

    def _launch(self, name: str, *, number: int, gpus: tuple[int, ...]) -> Launch:
        recipe = self._inputs.found.recipe
        orders = ChangedOrders(self._folder.engine_orders(name, number)) if self._loads_changes else None
        records_experts = self._records_experts(name)
        command = EngineCommand(
            orders=orders,
            records_experts=records_experts,
            kind=self._settings.engine,
            python=self._settings.engine_python or Path(sys.executable),
            extra_args=self._settings.engine_args,
            max_running_requests=min(_MAX_ENGINE_SLOTS, self._inputs.request.max_concurrent_tasks),
            num_threads=self._settings.engine_threads,
            seed=recipe.run.seed,
            gpus=gpus,
            tp_size=self._settings.engine_tp_size,
            loras=tuple(lora for lora in recipe.adapters.values() if lora.of == name),
            recomputes=recipe.raas.swap == "retract",
        )
        log_path = self._folder.engine_log(name, number)
        connect = partial(self._engine_at, orders=orders, records_experts=records_experts)
        return partial(start_engine, command, log_path=log_path, connect=connect)

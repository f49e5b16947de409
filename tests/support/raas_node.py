"""A whole node inside the test's own loop: real worker, session, pusher and weight sync; fake engine, weights without
bytes.

What differs from a started node is only what stands behind the engine and the mirror. Used by tests against a real
dataflow server, and to measure what a node costs per episode.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import version_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.node.assembly import NodeInputs, connect_node
from astraflow_raas.node.engine_host import HostSettings, RemoteHost
from astraflow_raas.node.folder import claim_folder
from astraflow_raas.node.hardware import describe_hardware
from astraflow_raas.node.joining import find_run, join_request, join_run
from astraflow_raas.node.node import Node, PolicyParts, PolicyTable
from astraflow_raas.policies.mirror_source import MirrorSource
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.push.spool import SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles
from astraflow_raas.recipe_code import load_workflow
from astraflow_raas.settings import NodeSettings
from astraflow_raas.timeline import Timeline
from astraflow_weights.errors import VerificationFailed
from astraflow_weights.mirror.lock import Hold
from astraflow_weights.versions.pull import PullCounts
from support.fake_engine import FakeEngine
from support.raas_parts import write_tokenizer


class BytelessWeights(MirrorSource):
    """Weights whose every version is the same folder with a tokenizer."""

    version: int | None = None
    counts = PullCounts()
    damage: VerificationFailed | None = None

    def probe(self, version: int) -> None:
        return None

    def changes(self, version: int) -> None:
        return None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prefetch(self, announced: version_pb2.Version) -> None:
        """Nothing to fetch."""

    def try_hold(self) -> Hold | None:
        """The folder, which never changes."""
        if self.version is None:
            return None
        descriptor = os.open(os.devnull, os.O_RDONLY)
        return Hold(version=self.version, directory=self.folder, written_by="", descriptor=descriptor)

    def fetch(self, announced: version_pb2.Version) -> Path:
        """Nothing to fetch."""
        self.version = announced.version
        return self.folder


@dataclass
class LocalNode:
    """A running node with what its test may look at."""

    node: Node
    engines: dict[str, FakeEngine]
    drain_requested: asyncio.Event

    async def drain(self, *, deadline_s: float = 10.0) -> None:
        """Leave as on SIGTERM, with this much time for each service."""
        for service in reversed(self.node.services):
            await service.stop(deadline_s=deadline_s)


@asynccontextmanager
async def local_node(
    address: str,
    folder: Path,
    *,
    node_id: str = "node-1",
    limits: SpoolLimits | None = None,
    **options: object,
) -> AsyncIterator[LocalNode]:
    """A node of the only run at `address`; `options` are node settings."""
    settings = NodeSettings(join=address, **options)  # type: ignore[arg-type]
    metrics, drain_requested = Metrics(), asyncio.Event()
    endpoint, served = Endpoint(), ServedEnvironments(settings.environment_connections)
    claimed = claim_folder(folder / "claimed", node_id=node_id)
    async with AsyncClient(address) as client:
        found = await find_run(client, "", patience_s=5.0)
        hardware = describe_hardware(settings)
        request = join_request(found, settings, node_id=node_id, hardware=hardware)
        engines = {name: FakeEngine() for name in found.recipe.served_policies}
        parts = {name: _parts(name, engines[name], folder / name, metrics) for name in engines}
        inputs = NodeInputs(
            found=found,
            request=request,
            joined=await join_run(client, request, folder=claimed, patience_s=5.0, name_patience_s=20.0),
            client=client,
            workflow=load_workflow(
                found.run,
                found.recipe,
                into=folder / "code",
                scratch=folder,
                allowed=settings.allow_recipe_code,
                endpoint=endpoint,
                served=served,
            ),
            endpoint=endpoint,
            served=served,
            settings=settings,
            metrics=metrics,
            timeline=Timeline(),
            drain_requested=lambda _reason: drain_requested.set(),
        )
        pusher = Pusher(client, metrics=metrics, limits=limits, files=SpoolFiles(folder / "spool" / node_id))
        node = connect_node(inputs, policies=PolicyTable(parts), pusher=pusher)
        if settings.allow_recipe_code:
            # Programs of a recipe ask here.
            await endpoint.start()
        running = [asyncio.create_task(service.run()) for service in node.services]
        local = LocalNode(node, engines, drain_requested)
        try:
            yield local
        finally:
            await local.drain()
            await asyncio.gather(*running)
            await node.session.close()


def _parts(name: str, engine: FakeEngine, folder: Path, metrics: Metrics) -> PolicyParts:
    policy = ServedPolicy(name)
    source = BytelessWeights(write_tokenizer(folder))
    weights = WeightSync(policy, source=source, metrics=metrics, evaluation_hold_s=5.0)
    settings = HostSettings(start_timeout_s=5.0, stall_s=5.0, first_backoff_s=0.05)
    (replica,) = policy.engines
    host = RemoteHost(policy, weights, lambda: engine, replica=replica, settings=settings, metrics=metrics)
    return PolicyParts(policy=policy, weights=weights, hosts=[host])

"""A trainer process: joins the run, prepares or resumes the policy, trains in a thread, answers
TrainerService meanwhile.

Invariant: the event loop never trains and the training thread never serves; a drain ends training after the
step in progress; an error of the training thread ends the process with the exit code of its kind. Called by
`__main__`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict

from astraflow.client import Client
from astraflow.errors import AstraflowError
from astraflow.plugins import Demonstrations
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_kit import lifecycle, plugins
from astraflow_kit.http import HttpServer, StatusSource, create_app
from astraflow_kit.lifecycle import Addresses, ExitCode, Lifecycle
from astraflow_kit.log import bind, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.recipe_code import require_installed
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import read_secret
from astraflow_trainer.controls import Controls
from astraflow_trainer.joined_run import JoinedRun, join_run
from astraflow_trainer.progress import Progress
from astraflow_trainer.servicer import TrainerServicer
from astraflow_trainer.session import TrainingSession
from astraflow_trainer.settings import TrainerSettings
from astraflow_weights.store import ObjectStore, open_store, probe_create_only
from astraflow_weights.version_log import VersionLog

log = get_logger(__name__)

__all__ = ["check", "run"]


def run(settings: TrainerSettings) -> int:
    """Serve and train to the end; returns the exit code."""
    return lifecycle.run(lambda life: _serve(settings, life), drain_timeout_s=settings.drain_timeout_s)


def check(settings: TrainerSettings) -> int:
    """Join, load what the recipe names, probe the store, and report; nothing is claimed, and nothing stays
    in the store.
    """
    try:
        with _client(settings) as client:
            joined = _join(client, settings)
        warm_start = joined.policy.model.warm_start
        if warm_start is not None:
            require_installed(warm_start.demonstrations, folder=joined.recipe_dir)
            plugins.load(warm_start.demonstrations, protocol=Demonstrations, recipe_dir=joined.recipe_dir)
        store = _usable_store(settings, joined)
        VersionLog(store, run_id=joined.run_id, policy_id=joined.policy_id).refresh()
    except AstraflowError as error:
        log.error("check.failed", reason=error.reason, message=error.message)
        return int(lifecycle.exit_code_of(error))
    log.info("check.passed", run_id=joined.run_id, policy_id=joined.policy_id, store=joined.store_uri)
    return int(ExitCode.OK)


async def _serve(settings: TrainerSettings, life: Lifecycle) -> None:
    metrics, progress, controls = Metrics(), Progress(), Controls()
    with _client(settings) as client:
        joined = await asyncio.to_thread(_join, client, settings)
        bind(run_id=joined.run_id, policy_id=joined.policy_id)
        # Before the warm start, which takes long: a store that cannot be used will not become usable.
        store = await asyncio.to_thread(_usable_store, settings, joined)
        session = TrainingSession(
            settings, client=client, joined=joined, store=store, progress=progress, controls=controls
        )
        servicer = TrainerServicer(progress, controls, run_id=joined.run_id, policy_id=joined.policy_id)
        grpc_server = GrpcServer(
            [(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)],
            settings=settings,
            metrics=metrics,
        )
        http_server = HttpServer(
            create_app(metrics=metrics, status=_status_of(progress)),
            host=settings.http_host,
            port=settings.http_port,
        )
        await lifecycle.run_services(
            [grpc_server, http_server, _Training(session, controls)],
            lifecycle=life,
            on_started=lambda: _publish_addresses(settings, grpc_server.address, http_server.address),
        )


class _Training:
    """The training thread as a service of the lifecycle."""

    def __init__(self, session: TrainingSession, controls: Controls) -> None:
        self._session = session
        self._controls = controls

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Train to the end in a thread."""
        await asyncio.to_thread(self._session.run)

    async def stop(self, *, deadline_s: float) -> None:
        """Ask for an end after the step in progress; `run` returns when it is published and checkpointed."""
        del deadline_s
        self._controls.stop_after_step()


def _client(settings: TrainerSettings) -> Client:
    return Client(settings.join, token=read_secret(settings.token_file) if settings.token_file else None)


def _join(client: Client, settings: TrainerSettings) -> JoinedRun:
    return join_run(
        client,
        run_id=settings.run_id,
        policy_id=settings.policy,
        work_dir=settings.work_dir,
        allow_recipe_code=settings.allow_recipe_code,
    )


def _usable_store(settings: TrainerSettings, joined: JoinedRun) -> ObjectStore:
    """The run's store, proven to be writable and to honour create-only PUT."""
    store = open_store(joined.store_uri, settings=settings.store)
    probe_create_only(store)
    return store


def _status_of(progress: Progress) -> StatusSource:
    async def status() -> Mapping[str, object]:
        state = asdict(progress.state)
        return {**state, "phase": progress.state.phase.value, "wait_fraction": progress.wait_fraction()}

    return status


def _publish_addresses(settings: TrainerSettings, grpc_address: str, http_address: str) -> None:
    if settings.address_file is not None:
        lifecycle.write_address_file(
            settings.address_file, Addresses(pid=os.getpid(), grpc=grpc_address, http=http_address)
        )

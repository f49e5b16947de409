"""A trainer process: joins the run, prepares or resumes the policy, trains in a thread, answers
TrainerService meanwhile.

Invariant: the event loop never trains and the training thread never serves; a drain ends training after the
step in progress; an error of the training thread ends the process with the exit code of its kind. Called by
`__main__`.
"""

import asyncio
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import stamina

from astraflow.client import Client, RetryPolicy
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import AstraflowError
from astraflow.plugins import Demonstrations
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_kit import lifecycle, traces
from astraflow_kit.folder_lock import lock_folder
from astraflow_kit.http import HttpServer, StatusSource, create_probes
from astraflow_kit.lifecycle import Addresses, Lifecycle
from astraflow_kit.log import bind, get_logger
from astraflow_kit.making import Making
from astraflow_kit.metric_schema import SCHEMA
from astraflow_kit.metrics import Metrics
from astraflow_kit.pages import Pages
from astraflow_kit.plugins import make
from astraflow_kit.serve import GrpcServer
from astraflow_trainer.controls import Controls
from astraflow_trainer.heartbeat import Heartbeat
from astraflow_trainer.joined_run import JoinedRun, JoinStopped, find_run, join_run
from astraflow_trainer.progress import Progress, StepRecord
from astraflow_trainer.publish.publishing import STORE_RETRY_S
from astraflow_trainer.ranks.device import training_device
from astraflow_trainer.ranks.group import RankGroup, join_rank_group
from astraflow_trainer.ranks.mesh import require_mesh
from astraflow_trainer.servicer import TrainerServicer
from astraflow_trainer.session import TrainingSession, own_folder
from astraflow_trainer.settings import RankSettings, TrainerSettings
from astraflow_trainer.stall import stalled
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.trackers.adapters import Subject, require_installed
from astraflow_trainer.trackers.feed import TrackerFeed, feeds
from astraflow_weights.errors import StoreFull, StoreMissing, StoreReadOnly
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.store.probing import probe_create_only
from astraflow_weights.versions.log import VersionLog

_LOST_RANK_GRACE_S = 5.0
_PATIENCE_SHARE = 0.25
"""Of the time for stopping, for a server that does not answer."""
_STORE_POLL_S = 5.0
_LACKING = (StoreMissing, StoreReadOnly, StoreFull)

log = get_logger(__name__)
_CHECK_PATIENCE_S = 5.0


def run(settings: TrainerSettings, rank: RankSettings) -> int:
    """Serve and train to the end, as one rank of the trainer; returns the exit code."""
    serve = _serve if rank.rank == 0 else _follow

    async def main(life: Lifecycle) -> None:
        # Never released: a training thread that a hard stop left behind may write until the process is gone.
        lock_folder(own_folder(settings, rank.rank), remedy="stop it, or choose another --work-dir")
        with suppress(JoinStopped):
            await serve(settings, rank, life)

    return lifecycle.run(main, drain_timeout_s=settings.drain_timeout_s)


def check(settings: TrainerSettings) -> Mapping[str, str]:
    """Join, load what the recipe names, probe the store; what was found, for people. Nothing is claimed, and nothing
    stays in the store.

    Raises the error that would stop the trainer.
    """
    with _client(settings) as client:
        run = find_run(client, settings.run_id, patience_s=_CHECK_PATIENCE_S)
    joined = _joined(run, settings, folder=settings.work_dir)
    Making(partial(_plugins_of, joined), settings.making).made()
    require_installed(joined.policy.trainer.trackers)
    store = _usable_store(settings, joined, remember=False)
    VersionLog(store, run_id=joined.run_id, policy_id=joined.policy_id).refresh_entries()
    return {"run": joined.run_id, "policy": joined.policy_id, "store": joined.store_uri}


async def _serve(settings: TrainerSettings, rank: RankSettings, life: Lifecycle) -> None:
    metrics, controls, progress = Metrics(), Controls(), Progress()
    with ExitStack() as stack:
        client = stack.enter_context(_client(settings))
        joined = await _join(client, settings, folder=settings.work_dir, life=life)
        bind(run_id=joined.run_id, policy_id=joined.policy_id)
        trackers = stack.enter_context(_feeds(joined, settings, metrics=metrics))
        progress.on_step = partial(_observe, metrics, trackers, policy_id=joined.policy_id)
        names = {"run_id": joined.run_id, "policy_id": joined.policy_id}
        heartbeat = stack.enter_context(Heartbeat(client, **names, progress=progress))
        plugins = await _made(joined, settings, progress=progress, life=life)
        # Before the warm start, which takes long: a store that cannot be used will not become usable.
        store = await asyncio.to_thread(_store_when_there, settings, joined, progress)
        group = await asyncio.to_thread(_meet, rank, settings)
        session = TrainingSession(
            settings,
            client=client,
            joined=joined,
            plugins=plugins,
            store=store,
            group=group,
            progress=progress,
            controls=controls,
            heartbeat=heartbeat,
        )
        servicer = TrainerServicer(progress, controls, **names, trackers=trackers)
        grpc_server = GrpcServer(
            [(trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)],
            settings=settings,
            metrics=metrics,
            run_id=joined.run_id,
        )
        stalls = partial(stalled, progress, after_s=settings.training_stall_s)
        pages = Pages(settings, life=life, metrics=metrics, status=_status_of(progress), run_id=joined.run_id)
        await lifecycle.run_services(
            [grpc_server, pages, _Training(session, controls, group, client, stalls)],
            lifecycle=life,
            on_started=lambda: lifecycle.write_address_file(
                settings.address_file,
                Addresses(grpc=grpc_server.address, http=pages.address, probe=pages.probe_address),
            ),
        )


async def _follow(settings: TrainerSettings, rank: RankSettings, life: Lifecycle) -> None:
    """A rank that is not the first: it trains and publishes its part, and answers at most probes."""
    traces.end()
    folder = own_folder(settings, rank.rank)
    with _client(settings) as client:
        joined = await _join(client, settings, folder=folder, life=life)
        bind(run_id=joined.run_id, policy_id=joined.policy_id)
        controls, progress = Controls(), Progress()
        plugins = await _made(joined, settings, progress=progress, life=life)
        group = await asyncio.to_thread(_meet, rank, settings)
        session = TrainingSession(
            settings,
            client=client,
            joined=joined,
            plugins=plugins,
            store=open_store(joined.store_uri, settings=settings.store),
            group=group,
            progress=progress,
            controls=controls,
        )
        stalls = partial(stalled, progress, after_s=settings.training_stall_s)
        training = _Training(session, controls, group, client, stalls)
        services = [*probes_of_pod(settings, rank, life), training]
        await lifecycle.run_services(services, lifecycle=life)


def probes_of_pod(settings: TrainerSettings, rank: RankSettings, life: Lifecycle) -> list[lifecycle.Service]:
    """The probe listener of a machine or pod without the first rank: the first of its ranks answers for it."""
    if settings.probe_port is None or rank.local_rank != 0:
        return []
    app = create_probes(started=life.started.is_set)
    return [HttpServer(app, host=settings.probe_host, port=settings.probe_port, setting="probe_port")]


class _Training:
    """The training thread as a service of the lifecycle."""

    def __init__(
        self,
        session: TrainingSession,
        controls: Controls,
        group: RankGroup,
        client: Client,
        stalls: Callable[[], Coroutine[Any, Any, AstraflowError]],
    ) -> None:
        """`stalls` returns what to end with once the thread stands still."""
        self._client = client
        self._stalls = stalls
        self._session = session
        self._controls = controls
        self._group = group

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Train to the end in a thread. Raises, within seconds, what ended another rank, or that the thread hangs."""
        lost = self._watch()
        stalled = asyncio.create_task(self._stalls())
        training = asyncio.create_task(asyncio.to_thread(self._train))
        waited: list[asyncio.Future[Any]] = [training, lost, stalled]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            stalled.cancel()
            training.result()
            return
        error = lost.result() if lost.done() else stalled.result()
        # The thread may be blocked in an exchange with the lost rank, or for good, which nothing can interrupt.
        asyncio.get_running_loop().call_later(
            _LOST_RANK_GRACE_S, os._exit, int(lifecycle.exit_code_of(error))
        )
        raise error

    async def stop(self, *, deadline_s: float) -> None:
        """Ask for an end after the step in progress; `run` returns when it is published and checkpointed."""
        self._controls.stop_after_step()
        self._client.end_within(deadline_s * _PATIENCE_SHARE)
        if self._group.watch is not None:
            self._group.watch.ask_to_stop()

    def _watch(self) -> asyncio.Future[AstraflowError]:
        """What ends another rank, when something does."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[AstraflowError] = loop.create_future()
        if self._group.watch is not None:
            self._group.watch.start(
                on_lost=lambda error: loop.call_soon_threadsafe(partial(lost.set_result, error)),
                on_stop_wanted=self._controls.stop_after_step,
            )
        return lost

    def _train(self) -> None:
        try:
            self._session.run()
        except BaseException as error:
            reason = self._group.explain(error)
            self._group.farewell(reason)
            if reason is error:
                raise
            raise reason from error
        self._group.farewell(None)


def _meet(rank: RankSettings, settings: TrainerSettings) -> RankGroup:
    require_mesh(num_ranks=rank.world_size, num_replicas=settings.replicas)
    device = training_device(settings.device, local_rank=rank.local_rank or 0)
    return join_rank_group(
        rank, timeout_s=settings.rank_timeout_s, silence_s=settings.rank_silence_s, device=device
    )


def _client(settings: TrainerSettings) -> Client:
    return Client(settings.connection, retry=RetryPolicy(total_s=settings.server_gone_timeout_s or math.inf))


async def _join(client: Client, settings: TrainerSettings, *, folder: Path, life: Lifecycle) -> JoinedRun:
    run = await asyncio.to_thread(
        find_run,
        client,
        settings.run_id,
        patience_s=settings.join_timeout_s,
        stopped=life.drain.is_set,
    )
    return await asyncio.to_thread(_joined, run, settings, folder=folder)


async def _made(
    joined: JoinedRun, settings: TrainerSettings, *, progress: Progress, life: Lifecycle
) -> StepPlugins:
    """The recipe's own parts of a step. Raises PluginError, JoinStopped."""

    def say(told: str) -> None:
        if life.drain.is_set():
            raise JoinStopped
        progress.starting("plugin_hung", detail=told)

    return await Making(partial(_plugins_of, joined), settings.making).made_beside(say)


def _plugins_of(joined: JoinedRun) -> StepPlugins:
    """Make them, and try the demonstrations, of which the warm start makes its own in the training thread."""
    warm_start = joined.policy.model.warm_start
    if warm_start is not None:
        make(warm_start.demonstrations, protocol=Demonstrations, source=joined.source)
    algorithm, roles = joined.policy.trainer.algorithm, joined.policy.advantages
    return StepPlugins.made(algorithm, source=joined.source, roles=roles)


def _joined(run: run_pb2.Run, settings: TrainerSettings, *, folder: Path) -> JoinedRun:
    return join_run(
        run,
        policy_id=settings.policy,
        work_dir=folder,
        allow_recipe_code=settings.allow_recipe_code,
        recipe_file=settings.recipe,
        overrides=settings.recipe_overrides,
    )


def _usable_store(settings: TrainerSettings, joined: JoinedRun, *, remember: bool = True) -> ObjectStore:
    """The run's store, proven to be writable and to honour create-only PUT."""
    place = hashlib.sha256(f"{joined.run_id} {joined.store_uri}".encode()).hexdigest()[:16]
    known = settings.work_dir / f"store-{place}" if remember else None
    store = open_store(joined.store_uri, settings=settings.store, known=known)
    probe_create_only(store, remember=remember)
    return store


def _store_when_there(settings: TrainerSettings, joined: JoinedRun, progress: Progress) -> ObjectStore:
    """As `_usable_store`; waits for one that this trainer used before and that is not mounted, read-only or full."""
    for attempt in stamina.retry_context(
        on=_LACKING, attempts=None, timeout=STORE_RETRY_S, wait_max=_STORE_POLL_S
    ):
        with attempt:
            try:
                store = _usable_store(settings, joined)
            except _LACKING as error:
                progress.store_lacks(error.wait, error.message)
                log.warning("store.waits", waiting_for=error.wait, message=error.message)
                raise
            progress.store_lacks("", "")
            return store
    raise AssertionError("the last attempt returns or raises")


def _status_of(progress: Progress) -> StatusSource:
    async def status() -> Mapping[str, object]:
        state = asdict(progress.state)
        last = progress.last_record
        return {
            **state,
            "phase": progress.state.phase.value,
            "wait_fraction": progress.wait_fraction(),
            "metrics": dict(last.metrics) if last is not None else {},
        }

    return status


def _feeds(
    joined: JoinedRun, settings: TrainerSettings, *, metrics: Metrics
) -> AbstractContextManager[Sequence[TrackerFeed]]:
    trackers = joined.policy.trainer.trackers
    require_installed(trackers)
    subject = Subject(
        run_id=joined.run_id,
        policy_id=joined.policy_id,
        folder=settings.work_dir / "trackers",
        settings=joined.recipe.model_dump(mode="json"),
    )
    return feeds(trackers, subject, metrics=metrics)


_GAUGES: Mapping[tuple[str, ...], str] = {
    ("astraflow_trainer_reward",): "reward_mean",
    ("astraflow_trainer_truncated",): "truncated_fraction",
    **{
        ("astraflow_trainer_completion_tokens", stat): f"completion_tokens_{stat}"
        for stat in ("mean", "p50", "p90", "max")
    },
    ("astraflow_trainer_staleness_versions", "mean"): "staleness_mean",
    ("astraflow_trainer_staleness_versions", "max"): "staleness_max",
    ("astraflow_trainer_gradient_norm",): "grad_norm",
    ("astraflow_trainer_clipped", "up"): "clip_fraction_up",
    ("astraflow_trainer_clipped", "down"): "clip_fraction_down",
    ("astraflow_trainer_ratio_max",): "ratio_max",
    ("astraflow_trainer_entropy_nats",): "entropy",
    ("astraflow_trainer_mismatch_kl_nats",): "mismatch_kl",
}
"""Metrics of a step by the gauge, with its labels after the policy, that shows them."""


def _observe(
    metrics: Metrics, trackers: Sequence[TrackerFeed], record: StepRecord, *, policy_id: str
) -> None:
    for tracker in trackers:
        tracker.put(record)
    metrics.set("astraflow_trainer_step", record.step, policy=policy_id)
    named = record.metrics
    for (name, *labels), step_metric in _GAUGES.items():
        if step_metric in named:  # not where nothing was computed
            labelled = dict(zip(SCHEMA[name].labels[1:], labels, strict=True))
            metrics.set(name, named[step_metric], policy=policy_id, **labelled)
    if num_groups := named["num_groups"]:
        zero_signal = named["num_zero_variance_groups"] / num_groups
        metrics.set("astraflow_trainer_zero_signal", zero_signal, policy=policy_id)
    for part, seconds in (("wait", record.wait_s), ("train", record.train_s)):
        metrics.increment("astraflow_trainer_seconds_total", seconds, policy=policy_id, part=part)
    if named["damaged_checkpoints"]:
        metrics.increment("astraflow_trainer_damaged_checkpoints_total", named["damaged_checkpoints"])
    for path, cause in itertools.product(("publish", "checkpoint"), ("copy", "wait")):
        blocked_s = record.metrics[f"{path}_{cause}_s"]
        metrics.observe(f"astraflow_trainer_{path}_blocked_seconds", blocked_s, cause=cause)

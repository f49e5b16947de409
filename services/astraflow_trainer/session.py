"""A trainer's hold on its policy: claim, go back to a checkpoint, fence, announce, replay, train on.

Invariant: nothing is trained or published before the policy is claimed, older writers are fenced out of the
store and every version in the store is announced. A trainer whose server lost data goes back to its newest
checkpoint that the server still knows and claims again, but only when no other trainer has a newer epoch;
otherwise the error that names the other one ends it. Every rank runs a session; the first one claims,
fetches, announces and sends the others what they must know. `server` runs it in the training thread.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from astraflow.blobs import blob_prefix
from astraflow.client import Client
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.errors import (
    AstraflowError,
    InvalidArgumentError,
    NotFoundError,
    RequestError,
    StateError,
    UnavailableError,
)
from astraflow.recipe import ResolvedPolicy
from astraflow.recipe.model import ReferenceModel
from astraflow_kit import failpoints
from astraflow_kit.log import bind, get_logger
from astraflow_trainer.agreement import Comparison
from astraflow_trainer.batches.failed_steps import FailedSteps
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.read_ahead import ReadAhead
from astraflow_trainer.batches.routing import delete_routing
from astraflow_trainer.batches.source import BatchSource, Claim, Ledger
from astraflow_trainer.controls import Controls
from astraflow_trainer.heartbeat import Heartbeat
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.learner import PolicyLearner
from astraflow_trainer.loop import Archived, LoopSettings, TrainingLoop
from astraflow_trainer.memory import keep_freed_memory
from astraflow_trainer.model.checkpoint import CheckpointError, set_aside_damaged
from astraflow_trainer.model.lora import write_adapter_config
from astraflow_trainer.model.resuming import Start, take_up
from astraflow_trainer.model.sharding import placement_of
from astraflow_trainer.progress import Progress
from astraflow_trainer.publish.open_publisher import compacting, open_publisher
from astraflow_trainer.publish.publishing import PublishWorker
from astraflow_trainer.ranks.board import Board
from astraflow_trainer.ranks.group import RankGroup
from astraflow_trainer.settings import TrainerSettings
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.warm_start.starting_model import (
    asset_files,
    built_reference,
    reference_model,
    starting_model,
)
from astraflow_weights.errors import Fenced, ObjectNotFound, StateInDoubt
from astraflow_weights.publish.agreement import on_first_rank
from astraflow_weights.publish.announcing import Announcer
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog

log = get_logger(__name__)


class TrainingSession:
    """Trains one policy from its first claim to its last step. Blocking; run it in a thread."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        client: Client,
        joined: JoinedRun,
        plugins: StepPlugins,
        store: ObjectStore,
        group: RankGroup,
        progress: Progress,
        controls: Controls,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """`heartbeat` is the first rank's, which speaks for all."""
        self._settings, self._heartbeat = settings, heartbeat
        self._client, self._joined, self._store = client, joined, store
        self._plugins = plugins
        self._progress, self._controls = progress, controls
        # Read once; writer and compactor take copies of it.
        self._log = VersionLog(store, run_id=joined.run_id, policy_id=joined.policy_id)
        self._group = group
        self._is_first = group.index == 0
        self._last_step = settings.steps or joined.policy.steps
        self._checkpoints = settings.work_dir / "checkpoints"
        self._num_damaged = 0
        self._source = BatchSource(
            client,
            run_id=joined.run_id,
            policy_id=joined.policy_id,
            # Of this process alone, also where every restart has the same host name and process id.
            trainer_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            ledger=Ledger(own_folder(settings, group.index) / "ledger.jsonl"),
            settings=joined.policy.batches,
            read_blob=partial(stored_blob, store, joined),
            failed=_failed_steps(settings, group),
        )

    def run(self) -> None:
        """Train to the end. Raises FencedError, naming the other trainer, when one took over."""
        bind(run_id=self._joined.run_id, policy_id=self._joined.policy_id)
        self._client.on_wait = partial(self._server_is_silent, threading.get_ident())
        keep_freed_memory()
        torch.set_num_threads(self._settings.threads)
        model_dir = self._starting_model()
        if self._is_first:
            # Before the claim, which begins what a checkpoint that cannot be read would end: the folder is ours alone.
            self._num_damaged = set_aside_damaged(self._checkpoints)
        claim = self._claim()
        with self._held() if self._is_first else nullcontext():
            self._train_on(claim, model_dir=model_dir)

    def _server_is_silent(self, training_thread: int, error: AstraflowError, waited_s: float) -> None:
        log.warning("server.silent", reason=error.reason, message=error.message, since_s=round(waited_s, 1))
        if threading.get_ident() == training_thread:  # the others do not hold up training
            self._progress.waiting(error.metadata.get("reason", "") or "server_silent")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """At the end of the block the policy is released."""
        try:
            yield
        finally:
            if self._heartbeat is not None:
                self._heartbeat.released()
            self._source.release()

    def _train_on(self, claim: Claim, *, model_dir: Path) -> None:
        while True:
            if self._heartbeat is not None:
                self._heartbeat.holds(claim.epoch, lease_s=claim.batch_lease_s)
            try:
                return self._train(claim, model_dir=model_dir)
            except (RequestError, StateError) as error:
                claim = self._claim_again(claim, error)

    def _claim(self) -> Claim:
        """Claim on the first rank; the claim, on every rank."""
        claim = on_first_rank(
            self._group.publishing,
            lambda: self._agreed(
                self._source.claim(known_epoch=self._epoch_in_store(), last_step=self._last_step)
            ),
            encode=asdict,
            decode=lambda content: Claim(**content),
        )
        self._source.adopt(claim)
        return claim

    def _claim_again(self, claim: Claim, error: RequestError | StateError) -> Claim:
        """Return a new claim when Redis lost what `error` complains about; raises `error`, or who fenced us.

        Several ranks start again instead, as a group: the others are in the middle of something.
        """
        if not self._is_first:
            raise error
        if isinstance(error, Fenced) or self._epoch_in_store() > claim.epoch:
            self._source.require_epoch(claim.last_finished_step + 1)
            raise error
        try:
            again = self._source.claim(
                known_epoch=claim.epoch, held_epoch=claim.epoch, last_step=self._last_step
            )
        except NotFoundError as gone:
            raise StateInDoubt(
                f"policy {self._joined.policy_id!r}: {gone.message}; this trainer held it, so the "
                "server's Redis was emptied, or the run was deleted: put that Redis back (docs/recovery.md)"
            ) from gone
        if again.data_incarnation == claim.data_incarnation:
            raise error
        log.warning("trainer.redis_lost_data", message=error.message, epoch=again.epoch)
        agreed = self._agreed(again)
        if self._group.size > 1:
            raise UnavailableError(f"Redis lost data, all ranks start again: {error.message}") from error
        return agreed

    def _agreed(self, claim: Claim) -> Claim:
        """The claim to go on with: `claim`, where store and checkpoints agree with it, or one of an accepted loss.

        Raises StateInDoubt, which the server then shows, too.
        """
        self._log.refresh_entries()  # after the claim: nobody of before it can announce any more
        comparison = Comparison(self._store, self._log, checkpoints=self._checkpoints)
        doubt = comparison.doubt(claim)
        if doubt is None:
            comparison.remember(claim.identity)
            return claim
        message = f"policy {self._joined.policy_id!r}: {doubt.message}"
        self._source.release(doubt=message)  # without which the server lets nobody accept a loss
        if not self._settings.accept_data_loss or doubt.step is None:
            raise StateInDoubt(message)
        log.warning("policy.data_loss_accepted", step=doubt.step, message=doubt.message)
        loss = batch_service_pb2.AcceptedLoss(identity=comparison.identity or claim.identity, step=doubt.step)
        return self._source.claim(known_epoch=claim.epoch, last_step=self._last_step, accepted_loss=loss)

    def _epoch_in_store(self) -> int:
        self._log.refresh_entries()
        return self._log.owner.epoch if self._log.owner else 0

    def _train(self, claim: Claim, *, model_dir: Path) -> None:
        self._progress.starting("model_loading", detail=f"loads {model_dir}, or the newest checkpoint")
        # After the claim: an older trainer that shares the folder can no longer release what we must replay.
        learner = PolicyLearner(
            self._joined.policy,
            plugins=self._plugins,
            model_dir=model_dir,
            reference_dir=_teacher(self._joined, self._settings, self._group, self._log, self._warm_start),
            checkpoint_dir=self._checkpoints,
            group=self._group,
            snapshot=self._settings.publish_snapshot,
            num_replicas=self._settings.replicas,
            placement=placement_of(self._settings),
            identity=claim.identity,
            seed=self._joined.recipe.run.seed,
            keep_logprobs=self._joined.logprob_archive is not None,
            moved=self._progress.moved,
        )
        publisher = open_publisher(
            self._store,
            joined=self._joined,
            epoch=claim.epoch,
            peers=self._group.publishing,
            held=learner.held,
            mirror_dir=self._settings.work_dir / "published",
            assets=self._assets(model_dir),
            log=self._log,
        )
        start = take_up(
            learner,
            publisher,
            peers=self._group.publishing,
            finished_step=claim.last_finished_step,
            durable_step=claim.last_durable_step,
            num_damaged=self._num_damaged,
        )
        self._require_retained(claim, start.step)
        if not start.went_back and not learner.positions():
            _begin_as_forked(learner, policy=self._joined.policy, source_dir=self._settings.source_work_dir)
        if start.went_back:
            # Before anything is trained or published: from now on this is where a restart goes on.
            learner.stage(step=start.step, version=start.version)()
            failpoints.hit("trainer.checkpoint_written")
            if self._is_first:
                self._source.mark_durable(start.step)
        self._joined.record_changes(own_folder(self._settings, self._group.index), first_step=start.step + 1)
        self._progress.claimed(epoch=claim.epoch, step=start.step, version=claim.version)
        log.info("policy.claimed", epoch=claim.epoch, step=start.step, version=start.version)
        self._train_from(start, learner=learner, claim=claim, publisher=publisher)

    def _train_from(
        self, start: Start, *, learner: PolicyLearner, claim: Claim, publisher: ShardPublisher
    ) -> None:
        policy, newest, training = self._joined.policy, publisher.newest, self._joined.policy.trainer
        # A commit may have been the last thing an earlier process did, and Redis may have lost announcements.
        if (announcer := self._announcer(claim)) is not None:
            announcer.announce_missing(publisher)
        compactor = compacting(
            self._store,
            client=self._client,
            joined=self._joined,
            epoch=claim.epoch,
            publisher=publisher,
            group=self._group,
        )
        with (
            compactor as notify,
            self._publish_worker(publisher, announcer, notify) as worker,
            _archiving(self._joined, self._store) as archived,
        ):
            if newest is None or _must_publish(newest.version, start.version, lost=publisher.base_lost):
                worker.submit(start.step, learner.published_bytes())
                worker.wait_until_done()
            if not policy.train:
                log.info("policy.published", version=start.version, reason="it is not trained")
                return
            ahead = _read_ahead(self._joined, self._source, self._group, claim)
            loop = TrainingLoop(
                source=RankBatches(self._source, self._group.training, ahead=ahead),
                learner=learner,
                publisher=worker,
                progress=self._progress,
                claim=claim,
                controls=self._controls,
                archived=archived,
                released=partial(_delete_routing, self._joined, self._store, self._group),
            )
            loop.run(
                LoopSettings(
                    first_step=start.step + 1,
                    version=start.version,
                    last_step=self._last_step,
                    published=_published_steps(self._group, publisher),
                    checkpoint_every_steps=training.checkpoint_every_steps,
                    checkpoint_every_s=training.checkpoint_every_s,
                    num_damaged=self._num_damaged,
                )
            )

    def _assets(self, model_dir: Path) -> list[Path]:
        """What travels with every version: all that the model has beside weights, and what an adapter is."""
        lora, folder = self._joined.policy.lora, own_folder(self._settings, self._group.index)
        return [*asset_files(model_dir), *([write_adapter_config(lora, folder)] if lora else [])]

    def _publish_worker(
        self, publisher: ShardPublisher, announcer: Announcer | None, notify: Callable[[], None]
    ) -> PublishWorker:
        return PublishWorker(
            publisher,
            announcer,
            policy_id=self._joined.policy_id,
            max_behind=self._joined.policy.trainer.publish.max_behind,
            published=partial(_published, self._progress, notify),
            failing=self._progress.store_lacks,
        )

    def _announcer(self, claim: Claim) -> Announcer | None:
        """The first rank's; it announces for all."""
        if not self._is_first:
            return None
        run_id, policy_id = self._joined.run_id, self._joined.policy_id
        return Announcer(self._client, run_id=run_id, policy_id=policy_id, epoch=claim.epoch)

    def _require_retained(self, claim: Claim, step: int) -> None:
        if step < claim.last_durable_step:
            raise InvalidArgumentError(
                f"{self._checkpoints} resumes after step {step}, but the batches up to step {claim.last_durable_step} "
                f"of policy {self._joined.policy_id!r} were released when a checkpoint covered them; start with the "
                "--work-dir of the trainer that wrote that checkpoint"
            )

    def _starting_model(self) -> Path:
        """The first rank makes it, which may take minutes; the others wait for it."""
        path = self._joined.policy.model.path
        if path is not None:
            self._progress.starting("model_loading", detail=f"reads {path}, a folder or of the hub")
        else:
            self._warm_start(0.0)
        if not self._is_first:
            return Path(self._group.wait_for_value("model_dir"))
        model_dir = starting_model(
            self._joined,
            cache=self._settings.cache,
            threads=self._settings.warm_start_cores,
            progress=self._warm_start,
            access=self._settings.store,
        )
        self._group.set_value("model_dir", str(model_dir.absolute()))
        return model_dir

    def _warm_start(self, share: float) -> None:
        detail = "supervised steps on the recipe's demonstrations, before step 1; they are cached for the next start"
        self._progress.starting("warm_start", detail=detail, fraction=share)


def _published_steps(group: RankGroup, publisher: ShardPublisher) -> dict[int, int]:
    """Step to the newest version that it published, on every rank."""
    return on_first_rank(
        group.publishing,
        lambda: {
            item.step: item.version for item in publisher.committed_since(None) if item.rollback_of is None
        },
        encode=lambda found: list(found.items()),
        decode=lambda pairs: {int(step): int(version) for step, version in pairs},
    )


def _published(progress: Progress, notify: Callable[[], None], committed: CommittedVersion) -> None:
    progress.published(committed.version)
    notify()


def _read_ahead(joined: JoinedRun, source: BatchSource, group: RankGroup, claim: Claim) -> ReadAhead | None:
    """What reads the next batch beside a step; None where steps are synchronous, or without `trainer.prefetch`."""
    dataflow, policy = joined.recipe.dataflow, joined.policy
    is_synchronous = dataflow.barrier != "none" or dataflow.alternate_every_steps is not None
    if is_synchronous or not policy.batches.max_staleness or not policy.trainer.prefetch:
        return None
    board = Board(group.store) if group.size > 1 else None
    return ReadAhead(source, lease_s=claim.batch_lease_s, is_first=group.index == 0, board=board)


def _teacher(
    joined: JoinedRun,
    settings: TrainerSettings,
    group: RankGroup,
    log: VersionLog,
    progress: Callable[[float], None],
) -> Path | None:
    """Where the model is that a KL term compares with; None for the initial one. The first rank gets it."""
    kl = joined.policy.trainer.algorithm.kl
    if kl is None or not isinstance(kl.reference, ReferenceModel):
        return None
    if group.index > 0:
        return Path(group.wait_for_value("reference_dir"))
    reference, cache = kl.reference, settings.cache
    if reference.warm_start is not None:
        threads = settings.warm_start_cores
        found = built_reference(reference, joined, cache=cache, threads=threads, progress=progress)
    else:
        folder = settings.work_dir / "references"
        access = settings.store
        found = reference_model(reference, log=log.copy(), folder=folder, cache=cache, access=access)
    group.set_value("reference_dir", str(found.absolute()))
    return found


def stored_blob(store: ObjectStore, joined: JoinedRun, uri: str) -> bytes:
    """What the run's store has under the URI of a blob. Raises LookupError."""
    prefix = blob_prefix(joined.store_uri, joined.run_id)
    name = uri.removeprefix(prefix)
    if name == uri:
        raise LookupError(f"{uri} is not below {prefix}")
    try:
        return store.get(f"{joined.run_id}/blobs/{name}")
    except ObjectNotFound as error:
        raise LookupError(str(error)) from error


def _delete_routing(joined: JoinedRun, store: ObjectStore, group: RankGroup, version: int) -> None:
    """Groups that `dataflow.replay` may play again keep what nodes recorded of them."""
    batches = joined.policy.batches
    if group.index == 0 and joined.policy.trainer.router_replay and batches.replay is None:
        before = version - batches.max_staleness
        delete_routing(store, run_id=joined.run_id, policy_id=joined.policy_id, before=before)


@contextmanager
def _archiving(joined: JoinedRun, store: ObjectStore) -> Iterator[Archived]:
    """What keeps log-probs; its end waits for those that are not written, for a while."""
    archive = joined.logprob_archive
    if archive is None:
        yield lambda batch, logprobs: None
        return
    from astraflow_archive.logprob_writer import LogprobWriter  # pyarrow is slow to import, and an extra

    with LogprobWriter(store, joined.run_id, settings=archive) as writer:
        yield writer.put


def _begin_as_forked(learner: PolicyLearner, *, policy: ResolvedPolicy, source_dir: Path | None) -> None:
    """The first step of a run that begins with a version of another: say with which optimizer, and take it up."""
    source = policy.model.from_version
    if source is None or not policy.train:
        return
    if source_dir is not None:
        if source.step is None:
            raise InvalidArgumentError(
                "--source-work-dir: the recipe does not say of which step the version is"
            )
        try:
            learner.begin_with(source_dir / "checkpoints", step=source.step, version=source.version)
        except CheckpointError as error:
            raise InvalidArgumentError(f"--source-work-dir: {error}") from error
    log.info(
        "policy.forked",
        source=f"{source.run}/{source.policy}",
        version=source.version,
        step=source.step,
        optimizer="fresh" if source_dir is None else f"of the checkpoint of step {source.step}",
    )


def _must_publish(newest: int, start: int, *, lost: bool) -> bool:
    """Whether the weights to start from are not in the store, or are what nobody can read there any more: published
    again, they are equal to the newest version, or get the next number.
    """
    return newest < start or (lost and newest == start)


def _failed_steps(settings: TrainerSettings, group: RankGroup) -> FailedSteps:
    return FailedSteps(settings.work_dir, own=own_folder(settings, group.index), explain=group.explain)


def own_folder(settings: TrainerSettings, rank: int) -> Path:
    """What a rank writes without the others; the first one writes into the work folder itself."""
    return settings.work_dir if rank == 0 else settings.work_dir / f"rank-{rank}"

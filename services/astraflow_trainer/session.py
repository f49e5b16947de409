"""A trainer's hold on its policy: claim, go back to a checkpoint, fence, announce, replay, train on.

Invariant: nothing is trained or published before the policy is claimed, older writers are fenced out of the
store and every version in the store is announced. A trainer whose server lost data goes back to its newest
checkpoint that the server still knows and claims again, but only when no other trainer has a newer epoch;
otherwise the error that names the other one ends it. `server` runs it in the training thread.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import torch

from astraflow.client import Client
from astraflow.errors import InvalidArgumentError, RequestError, StateError
from astraflow_kit.log import bind, get_logger
from astraflow_trainer.batch_source import BatchSource, Claim, Ledger
from astraflow_trainer.controls import Controls
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.learner import PolicyLearner
from astraflow_trainer.loop import LoopSettings, TrainingLoop
from astraflow_trainer.memory import keep_freed_memory
from astraflow_trainer.progress import Progress
from astraflow_trainer.publish import Announcer, PublishWorker
from astraflow_trainer.rank_batches import RankBatches
from astraflow_trainer.ranks import OneRank
from astraflow_trainer.settings import TrainerSettings
from astraflow_trainer.starting_model import asset_files, starting_model
from astraflow_weights.errors import Fenced
from astraflow_weights.mirror import Mirror
from astraflow_weights.publisher import Publisher
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.version_log import VersionLog
from astraflow_weights.version_writer import CommittedVersion, VersionWriter

log = get_logger(__name__)

__all__ = ["TrainingSession"]


class TrainingSession:
    """Trains one policy from its first claim to its last step. Blocking; run it in a thread."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        client: Client,
        joined: JoinedRun,
        store: ObjectStore,
        progress: Progress,
        controls: Controls,
    ) -> None:
        self._settings = settings
        self._client = client
        self._joined = joined
        self._progress = progress
        self._controls = controls
        self._store = store
        self._source = BatchSource(
            client,
            run_id=joined.run_id,
            policy_id=joined.policy_id,
            # Of this process alone, also where every restart has the same host name and process id.
            trainer_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            ledger=Ledger(settings.work_dir / "ledger.jsonl"),
        )

    def run(self) -> None:
        """Train to the end. Raises FencedError, naming the other trainer, when one took over."""
        bind(run_id=self._joined.run_id, policy_id=self._joined.policy_id)
        keep_freed_memory()
        torch.set_num_threads(self._settings.threads)
        model_dir = self._starting_model()
        claim = self._source.claim(known_epoch=self._epoch_in_store())
        while True:
            try:
                return self._train(claim, model_dir=model_dir)
            except (RequestError, StateError) as error:
                claim = self._claim_again(claim, error)

    def _claim_again(self, claim: Claim, error: RequestError | StateError) -> Claim:
        """Return a new claim when Redis lost what `error` complains about; raises `error`, or who fenced us."""
        if isinstance(error, Fenced) or self._epoch_in_store() > claim.epoch:
            self._source.require_epoch(claim.last_finished_step + 1)
            raise error
        again = self._source.claim(known_epoch=claim.epoch, held_epoch=claim.epoch)
        if again.data_incarnation == claim.data_incarnation:
            raise error
        log.warning("trainer.redis_lost_data", message=error.message, epoch=again.epoch)
        return again

    def _epoch_in_store(self) -> int:
        versions = VersionLog(self._store, run_id=self._joined.run_id, policy_id=self._joined.policy_id)
        versions.refresh()
        return versions.owner.epoch if versions.owner else 0

    def _train(self, claim: Claim, *, model_dir: Path) -> None:
        self._progress.starting("model")
        # After the claim: an older trainer that shares the folder can no longer release what we must replay.
        learner = PolicyLearner(
            self._joined.recipe, model_dir=model_dir, checkpoint_dir=self._settings.work_dir / "checkpoints"
        )
        position = learner.restore(at_most=claim.last_finished_step)
        step, version = (position.step, position.version) if position else (0, 0)
        self._require_retained(claim, step)
        publisher = self._publisher(claim, assets=asset_files(model_dir))
        self._progress.claimed(epoch=claim.epoch, step=step, version=claim.version)
        log.info("policy.claimed", epoch=claim.epoch, step=step, version=version)
        self._train_from(step, version, learner=learner, claim=claim, publisher=publisher)

    def _train_from(
        self, step: int, version: int, *, learner: PolicyLearner, claim: Claim, publisher: Publisher
    ) -> None:
        recipe, newest = self._joined.recipe, publisher.newest
        announcer = Announcer(
            self._client,
            run_id=self._joined.run_id,
            policy_id=self._joined.policy_id,
            epoch=claim.epoch,
        )
        # A commit may have been the last thing an earlier process did, and Redis may have lost announcements.
        announcer.announce_missing(publisher)
        worker = PublishWorker(
            publisher, announcer, max_behind=recipe.trainer.publish.max_behind, published=self._published
        )
        with worker:
            if newest is None or newest.step < step:
                worker.submit(step, learner.published_bytes())
                worker.wait_until_done()
            loop = TrainingLoop(
                source=RankBatches(self._source, OneRank()),
                learner=learner,
                publisher=worker,
                progress=self._progress,
                claim=claim,
                controls=self._controls,
            )
            loop.run(
                LoopSettings(
                    first_step=step + 1,
                    version=version,
                    last_step=recipe.run.steps,
                    published={item.step: item.version for item in publisher.committed_since(None)},
                    checkpoint_every_steps=recipe.trainer.checkpoint_every_steps,
                )
            )

    def _require_retained(self, claim: Claim, step: int) -> None:
        if step < claim.last_durable_step:
            folder = self._settings.work_dir / "checkpoints"
            raise InvalidArgumentError(
                f"{folder} resumes after step {step}, but the batches up to step {claim.last_durable_step} of "
                f"policy {self._joined.policy_id!r} were released when a checkpoint covered them; start with the "
                "--work-dir of the trainer that wrote that checkpoint"
            )

    def _starting_model(self) -> Path:
        self._progress.starting("warm_start")
        return starting_model(
            self._joined,
            cache=self._settings.cache,
            threads=self._settings.warm_start_cores,
            progress=lambda share: self._progress.starting("warm_start", fraction=share),
        )

    def _publisher(self, claim: Claim, *, assets: list[Path]) -> Publisher:
        """Fence older writers, then take the newest published bytes as the base of the next delta."""
        recipe = self._joined.recipe.trainer.publish
        writer = VersionWriter.open(
            self._store,
            run_id=self._joined.run_id,
            policy_id=self._joined.policy_id,
            epoch=claim.epoch,
            settings=PublishSettings(snapshot_every_versions=recipe.snapshot_every_versions),
        )
        newest = writer.log.latest()
        base = None
        if newest is not None:
            mirror = Mirror(self._settings.work_dir / "published")
            mirror.advance(self._store, writer.log, target=newest.version)
            base = mirror.load()
        return Publisher(writer, base=base, assets=assets)

    def _published(self, committed: CommittedVersion) -> None:
        self._progress.published(committed.version)

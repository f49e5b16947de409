"""The order of a step, what is published and when, replay, stopping, and failures beside training.

Batches come from a scripted server over real gRPC and versions leave through the real worker; the learner and
the store only write down what they were asked, into the same list of events.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from astraflow.dataflow.v1.batch_service_pb2 import AcquireBatchRequest, AcquireBatchResponse
from astraflow.errors import FencedError, PreconditionError, UnavailableError
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import BatchSource, Ledger
from astraflow_trainer.controls import PAUSED, Controls, RateChange
from astraflow_trainer.loop import LoopSettings, TrainingLoop
from astraflow_trainer.progress import Phase, Progress
from astraflow_trainer.publish.publishing import Announcer, ModelBytes, PublishWorker
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.step import Outcome, SkipReason, StepMetrics
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.publish.version_writer import CommittedVersion
from support.published_models import committed
from support.scripted_batches import PATIENCE_S, ScriptedBatches, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID

Hook = Callable[[int], object]


def _nothing(_step: int) -> None:
    """The default of every hook."""


@dataclass
class Bookkeeper:
    """A learner that counts instead of learning; its weights are the number of the last trained step."""

    events: list[str]
    skips: frozenset[int] = frozenset()
    on_train: Hook = _nothing
    on_save: Hook = _nothing
    learning_rate: float = 0.25
    _step: int = 0

    def train(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        self._step = int(rows[0].group_id.removeprefix("g"))
        self.events.append(f"train {self._step}")
        self.on_train(self._step)
        skipped = self._step in self.skips
        return StepMetrics(
            outcome=Outcome.SKIPPED if skipped else Outcome.COMMITTED,
            skip_reason=SkipReason.NO_SIGNAL if skipped else SkipReason.NONE,
            num_rows=len(rows),
            num_trained_rows=0 if skipped else len(rows),
            num_groups=1,
            num_zero_variance_groups=int(skipped),
            reward_mean=0.5,
            num_micro_batches=1,
            packing_efficiency=1.0,
            learning_rate=self.learning_rate,
            gradient_norm=2.0,
            clip_low=0.2,
            clip_high=0.28,
            loss=None,
        )

    def published_bytes(self) -> ModelBytes:
        shards = whole({"weight": np.asarray([self._step], dtype=np.uint16)})
        return ModelBytes(open=lambda: shards)

    def set_learning_rate(self, peak: float) -> None:
        self.events.append(f"rate {peak:g}")
        self.learning_rate = peak

    def save(self, *, step: int, version: int) -> None:
        self.events.append(f"save {step} at version {version}")
        self.on_save(step)


@dataclass
class Store:
    """Numbers versions upwards from `newest`, once per step, when its gate is open."""

    events: list[str]
    versions: dict[int, int] = field(default_factory=dict)
    """Step to the version it already has."""
    newest: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None
    log: list[CommittedVersion] = field(default_factory=list)

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        return [item for item in self.log if version is None or item.version > version]

    def publish(
        self, model: ShardedModel, *, step: int, learning_rate: float | None = None
    ) -> CommittedVersion:
        assert self.gate.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        assert model.shards["weight"].elements.tolist() == [step]
        existed = step in self.versions
        self.newest = self.versions.setdefault(step, self.newest + 1)
        self.events.append(f"publish {step}")
        version = committed(self.newest, step=step, existed=existed)
        self.log.append(version)
        return version


@dataclass
class Bench:
    """A loop with everything around it."""

    script: ScriptedBatches
    learner: Bookkeeper
    store: Store
    progress: Progress
    worker: PublishWorker
    loop: TrainingLoop
    controls: Controls
    ledger_path: Path

    @property
    def events(self) -> list[str]:
        return self.script.events

    def about(self, *kinds: str) -> list[str]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event.split()[0] in kinds]

    def run(
        self, *, last_step: int, published: dict[int, int] | None = None, checkpoint_every_steps: int = 100
    ) -> None:
        """Run the loop from the first step on, as the server does."""
        settings = LoopSettings(
            first_step=1,
            version=0,
            last_step=last_step,
            published=published or {0: 0},
            checkpoint_every_steps=checkpoint_every_steps,
        )
        with self.worker:
            self.loop.run(settings)


@contextmanager
def _bench(
    folder: Path,
    *,
    script: ScriptedBatches | None = None,
    skips: frozenset[int] = frozenset(),
    max_behind: int = 1,
    versions: dict[int, int] | None = None,
) -> Iterator[Bench]:
    script = script or ScriptedBatches()
    learner, progress = Bookkeeper(script.events, skips), Progress()
    store = Store(script.events, dict(versions or {}))
    store.gate.set()
    ledger_path = folder / "ledger.jsonl"
    with serving(script) as client:
        source = BatchSource(
            client, run_id=RUN_ID, policy_id=POLICY, trainer_id="t", ledger=Ledger(ledger_path)
        )
        claim = source.claim()
        announcer = Announcer(client, run_id=RUN_ID, policy_id=POLICY, epoch=claim.epoch)
        worker = PublishWorker(
            store,
            announcer,
            policy_id=POLICY,
            max_behind=max_behind,
            published=lambda committed: progress.published(committed.version),
        )
        controls = Controls()
        loop = TrainingLoop(
            source=RankBatches(source, OneRank()),
            learner=learner,
            publisher=worker,
            progress=progress,
            claim=claim,
            controls=controls,
        )
        try:
            yield Bench(script, learner, store, progress, worker, loop, controls, ledger_path)
        finally:
            store.gate.set()


@contextmanager
def _in_background(run: Callable[[], None]) -> Iterator[None]:
    """Run the loop in a thread, as a trainer does; leaving waits for its end, and raises what it raised."""
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(run)
        yield
        running.result(PATIENCE_S)


def test_a_step_is_announced_to_the_server_before_and_after_training_and_then_published(
    tmp_path: Path,
) -> None:
    with _bench(tmp_path) as bench:
        bench.run(last_step=1)
        assert bench.about("acquire", "intent", "fetch", "train", "trained", "publish", "announce") == [
            "acquire 1",
            "intent 1",
            "fetch 1",
            "train 1",
            "trained 1",
            "publish 1",
            "announce 1",
        ]


def test_each_step_starts_from_the_version_of_the_one_before(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.run(last_step=3)
        assert bench.script.base_versions == [0, 1, 2]
        assert bench.about("announce") == ["announce 1", "announce 2", "announce 3"]
        state = bench.progress.state
        assert (state.phase, state.step, state.version) == (Phase.FINISHED, 3, 3)


def test_a_skipped_step_publishes_nothing_and_keeps_the_version(tmp_path: Path) -> None:
    with _bench(tmp_path, skips=frozenset({2})) as bench:
        bench.run(last_step=3)
        assert bench.script.base_versions == [0, 1, 1]
        assert bench.about("trained", "skipped") == ["trained 1", "skipped 2", "trained 3"]
        assert bench.about("publish") == ["publish 1", "publish 3"]
        assert [record.version for record in bench.progress.records_after(0)] == [1, None, 2]


def test_a_finished_step_leaves_its_numbers(tmp_path: Path) -> None:
    with _bench(tmp_path, skips=frozenset({2})) as bench:
        bench.run(last_step=2)
        first, second = bench.progress.records_after(0)
    assert first.metrics["reward_mean"] == 0.5
    assert first.metrics["learning_rate"] == 0.25
    assert (first.metrics["num_trajectories"], first.metrics["num_tokens"]) == (2.0, 6.0)
    # The second trajectory of step 2 began one version before the step's.
    assert (second.metrics["staleness_mean"], second.metrics["staleness_max"]) == (0.5, 1.0)
    assert (first.metrics["skipped"], second.metrics["skipped"]) == (0.0, 1.0)
    assert first.wait_s >= 0.0
    assert first.train_s >= 0.0


def test_a_stalled_store_holds_training_up_only_when_max_behind_versions_wait(tmp_path: Path) -> None:
    with _bench(tmp_path, max_behind=2) as bench:
        bench.store.gate.clear()
        with _in_background(lambda: bench.run(last_step=4)):
            eventually(lambda: bench.progress.state.waiting_for == "publish", what="the loop to be held up")
            held_from = time.monotonic()
            # Their records are there, and their versions are not even encoded.
            assert [record.step for record in bench.progress.records_after(0)] == [1, 2, 3]
            assert bench.about("train", "publish") == ["train 1", "train 2", "train 3"]
            held_s = time.monotonic() - held_from
            bench.store.gate.set()
        first, *_, last = (record.metrics for record in bench.progress.records_after(0))
        assert last["publish_wait_s"] >= held_s
        assert last["publish_blocked_s"] == last["publish_copy_s"] + last["publish_wait_s"]
        assert 0.0 < first["publish_copy_s"] <= first["publish_blocked_s"]


def test_waiting_before_a_checkpoint_counts_for_the_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _bench(tmp_path) as bench:
        wait_until_done = bench.worker.wait_until_done

        def slowly() -> None:
            time.sleep(0.05)
            wait_until_done()

        monkeypatch.setattr(bench.worker, "wait_until_done", slowly)
        bench.run(last_step=2, checkpoint_every_steps=1)
        assert bench.progress.records_after(0)[1].metrics["publish_wait_s"] >= 0.05


def test_a_stop_request_ends_training_after_the_step_in_progress(tmp_path: Path) -> None:
    answers: list[int] = []
    with _bench(tmp_path) as bench:
        bench.learner.on_train = lambda step: (
            answers.append(bench.controls.stop_after_step()) if step == 2 else None
        )
        bench.run(last_step=50)
        assert answers == [2]
        assert bench.about("acquire") == ["acquire 1", "acquire 2"]
        assert bench.about("announce") == ["announce 1", "announce 2"]
        assert bench.events[-1] == "durable 2"
        assert bench.progress.state.phase is Phase.FINISHED


def test_a_stop_request_during_a_checkpoint_names_the_step_it_covers(tmp_path: Path) -> None:
    answers: list[int] = []
    with _bench(tmp_path) as bench:
        bench.learner.on_save = lambda _: answers.append(bench.controls.stop_after_step())
        bench.run(last_step=50, checkpoint_every_steps=3)
        assert answers == [3]
        assert bench.progress.state.step == 3


def test_a_stop_request_while_waiting_for_a_batch_takes_no_further_step(tmp_path: Path) -> None:
    script = ScriptedBatches()
    with _bench(tmp_path, script=script) as bench:
        bench.learner.on_train = lambda _: script.empty_polls.extend(["ready_groups"] * 10_000)
        with _in_background(lambda: bench.run(last_step=50)):
            eventually(lambda: bench.progress.state.waiting_for == "ready_groups", what="an empty poll")
            assert bench.controls.stop_after_step() == 1
        assert bench.about("train", "durable") == ["train 1", "durable 1"]


def test_a_stop_request_before_the_first_step_does_nothing_at_all(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        assert bench.controls.stop_after_step() == 0
        bench.run(last_step=50)
        assert bench.about("acquire", "train", "save", "durable") == []
        assert bench.progress.state.phase is Phase.FINISHED


def _poll(script: ScriptedBatches, *, after_step: int) -> Hook:
    """A hook that leaves the trainer waiting for a batch after a step."""

    def hook(step: int) -> None:
        if step == after_step:
            script.empty_polls.extend(["ready_groups"] * 10_000)

    return hook


def test_a_paused_trainer_publishes_waits_with_a_reason_and_goes_on_when_told(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.learner.on_train = lambda step: bench.controls.pause("maintenance") if step == 2 else None
        with _in_background(lambda: bench.run(last_step=3)):
            eventually(lambda: bench.progress.state.waiting_for == PAUSED, what="the pause")
            eventually(lambda: "announce 2" in bench.events, what="the version of the step before the pause")
            assert bench.progress.state.phase is Phase.WAITING
            assert bench.about("acquire", "train") == ["acquire 1", "train 1", "acquire 2", "train 2"]
            assert bench.controls.pause_reason == "maintenance"
            assert bench.controls.resume() == 2
        assert bench.about("train")[-1] == "train 3"


class Meddling(ScriptedBatches):
    """Does something while a poll for a batch is under way."""

    meanwhile: Hook = staticmethod(_nothing)

    def AcquireBatch(self, request: AcquireBatchRequest, context: object) -> AcquireBatchResponse:
        self.meanwhile(request.step)
        return super().AcquireBatch(request, context)


def test_a_batch_that_comes_after_a_pause_was_promised_waits_for_its_end(tmp_path: Path) -> None:
    script, promised = Meddling(), []
    with _bench(tmp_path, script=script) as bench:

        def pause(step: int) -> None:
            if step == 2 and not promised:
                promised.append(bench.controls.pause("meanwhile"))

        script.meanwhile = pause
        with _in_background(lambda: bench.run(last_step=2)):
            eventually(lambda: bench.progress.state.waiting_for == PAUSED, what="the pause")
            assert promised == [1]
            assert bench.about("train") == ["train 1"]
            bench.controls.resume()
        assert bench.about("train") == ["train 1", "train 2"]


def test_a_stop_request_ends_a_pause(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        assert bench.controls.pause("before anything") == 0
        with _in_background(lambda: bench.run(last_step=3)):
            eventually(lambda: bench.progress.state.waiting_for == PAUSED, what="the pause")
            bench.controls.stop_after_step()
        assert bench.about("acquire", "train") == []


def test_a_checkpoint_asked_for_is_durable_when_it_is_answered_and_asking_again_changes_nothing(
    tmp_path: Path,
) -> None:
    script = ScriptedBatches()
    with _bench(tmp_path, script=script) as bench:
        bench.learner.on_train = _poll(script, after_step=2)
        with _in_background(lambda: bench.run(last_step=50)):
            eventually(lambda: bench.progress.state.waiting_for == "ready_groups", what="an empty poll")
            assert bench.controls.checkpoint().result(PATIENCE_S) == 2
            assert "durable 2" in bench.events
            assert bench.progress.state.durable_step == 2
            assert bench.controls.checkpoint().result(PATIENCE_S) == 2
            bench.controls.stop_after_step()
        assert set(bench.about("save")) == {"save 2 at version 2"}


def test_a_checkpoint_is_written_during_a_pause_too(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.learner.on_train = lambda step: bench.controls.pause("") if step == 1 else None
        with _in_background(lambda: bench.run(last_step=50)):
            eventually(lambda: bench.progress.state.waiting_for == PAUSED, what="the pause")
            assert bench.controls.checkpoint().result(PATIENCE_S) == 1
            assert bench.about("train") == ["train 1"]
            bench.controls.stop_after_step()


def test_a_learning_rate_holds_from_the_next_step_on_and_is_in_a_checkpoint_before_that(
    tmp_path: Path,
) -> None:
    with _bench(tmp_path) as bench:
        asked: list[Future[RateChange]] = []
        bench.learner.on_train = lambda step: (
            asked.append(bench.controls.set_learning_rate(0.125)) if step == 2 else None
        )
        bench.run(last_step=3)
        assert asked[0].result(0) == RateChange(first_step=3, previous=0.25)
        wanted = ["train 2", "rate 0.125", "save 2 at version 2", "durable 2", "train 3"]
        assert bench.about("train", "rate", "save", "durable")[1:6] == wanted
        rates = [record.metrics["learning_rate"] for record in bench.progress.records_after(0)]
        assert rates == [0.25, 0.25, 0.125]
        assert bench.progress.state.learning_rate == 0.125


def test_a_replay_is_not_crossed_by_a_new_learning_rate(tmp_path: Path) -> None:
    script = ScriptedBatches(last_finished_step=2)
    with _bench(tmp_path, script=script, versions={1: 1, 2: 2}) as bench:
        bench.store.newest = 2
        bench.learner.on_train = lambda step: bench.controls.set_learning_rate(0.125) if step == 1 else None
        bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
        assert bench.about("train", "rate") == ["train 1", "train 2", "rate 0.125", "train 3"]


def test_whoever_waits_when_training_fails_or_ends_is_told(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        asked: list[Future[int]] = []

        def fail(_step: int) -> None:
            asked.append(bench.controls.checkpoint())
            raise FloatingPointError("no")

        bench.learner.on_train = fail
        with pytest.raises(FloatingPointError):
            bench.run(last_step=3)
        with pytest.raises(UnavailableError, match="the trainer is ending: no"):
            asked[0].result(0)
    with _bench(tmp_path) as bench:
        bench.run(last_step=1)
        with pytest.raises(PreconditionError, match="ended after step 1"):
            bench.controls.checkpoint()


@pytest.mark.parametrize("max_behind", [1, 3])
def test_no_step_starts_while_more_than_max_behind_versions_are_unpublished(
    tmp_path: Path, max_behind: int
) -> None:
    with _bench(tmp_path, max_behind=max_behind) as bench:
        bench.store.gate.clear()
        with _in_background(lambda: bench.run(last_step=max_behind + 3)):
            trained = f"trained {max_behind + 1}"
            eventually(
                lambda: trained in bench.events and bench.progress.state.waiting_for == "publish",
                what="the loop to wait for publishing",
            )
            assert len(bench.about("train")) == max_behind + 1
            assert bench.progress.state.phase is Phase.WAITING
            assert bench.about("acquire")[-1] == f"acquire {max_behind + 1}"
            bench.store.gate.set()
        assert len(bench.about("announce")) == max_behind + 3


def test_a_checkpoint_covers_only_announced_versions_and_a_step_is_durable_after_it(tmp_path: Path) -> None:
    """Else a crash between the two would lose a version: no checkpoint leads back to its step."""
    with _bench(tmp_path) as bench:
        bench.store.gate.clear()
        with _in_background(lambda: bench.run(last_step=1, checkpoint_every_steps=1)):
            eventually(lambda: "trained 1" in bench.events, what="the step to be taken")
            assert bench.about("save", "durable") == []
            bench.store.gate.set()
        assert bench.about("save", "announce", "durable") == [
            "announce 1",
            "save 1 at version 1",
            "durable 1",
        ]


def test_a_replayed_step_counts_as_it_was_recorded(tmp_path: Path) -> None:
    """On a GPU the guard may decide otherwise the second time; the server has counted already."""
    script = ScriptedBatches(last_finished_step=2)
    with _bench(tmp_path, script=script, skips=frozenset({2})) as bench:
        bench.run(last_step=3)
        assert bench.about("publish") == ["publish 1", "publish 2", "publish 3"]
        ledger = [json.loads(line)["stage"] for line in bench.ledger_path.read_text().splitlines()]
        assert ledger == ["TRAINED", "TRAINED", "TRAINED"]


def test_steps_that_the_server_forgot_are_taken_and_published_again(tmp_path: Path) -> None:
    """Versions 1 and 2 are in the store, their steps are not finished: Redis lost its tail."""
    with _bench(tmp_path, versions={1: 3, 2: 4}) as bench:
        bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
        assert bench.about("trained", "publish") == [
            *("trained 1", "publish 1"),
            *("trained 2", "publish 2"),
            *("trained 3", "publish 3"),
        ]
        assert [record.version for record in bench.progress.records_after(0)] == [3, 4, 5]
        assert bench.script.base_versions == [2, 3, 4]


def test_while_nodes_wait_for_a_forgotten_version_it_is_announced_again(tmp_path: Path) -> None:
    with _bench(tmp_path, skips=frozenset({2})) as bench:

        def forget(step: int) -> None:
            if step == 2:
                eventually(lambda: len(bench.script.announced) == 1, what="version 1 to be announced")
                bench.script.announced.clear()
                bench.script.empty_polls.append("ready_groups")

        def hear_again(step: int) -> None:
            if step == 3:
                eventually(lambda: bench.script.announced, what="version 1 to be announced again")

        bench.learner.on_train = lambda step: (forget(step), hear_again(step))
        bench.run(last_step=3)
        assert [version.version for version in bench.script.announced] == [1, 2]


def test_checkpoints_come_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    with _bench(tmp_path, skips=frozenset({4})) as bench:
        bench.run(last_step=5, checkpoint_every_steps=2)
        assert bench.about("save") == ["save 2 at version 2", "save 4 at version 3", "save 5 at version 4"]
        assert bench.about("durable") == ["durable 2", "durable 4", "durable 5"]


def test_an_end_that_a_checkpoint_covers_needs_no_other(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.run(last_step=4, checkpoint_every_steps=2)
        assert bench.about("durable") == ["durable 2", "durable 4"]


def test_replayed_steps_are_trained_again_but_neither_acked_nor_published_again(tmp_path: Path) -> None:
    """Steps 1 to 3 were acked, and step 2 published, before the process died without a checkpoint."""
    script = ScriptedBatches(last_finished_step=3)
    with _bench(tmp_path, script=script, versions={2: 2}) as bench:
        bench.run(last_step=4, published={0: 0, 1: 1, 2: 2})
        assert bench.about("train") == ["train 1", "train 2", "train 3", "train 4"]
        assert bench.about("intent", "trained") == ["intent 4", "trained 4"]
        assert bench.about("publish") == ["publish 2", "publish 3", "publish 4"]
        # Of replayed steps the server ignores it: they are bound.
        assert bench.script.base_versions == [2, 2, 2, 3]
        assert [record.version for record in bench.progress.records_after(0)] == [1, 2, 3, 4]
        ledger = [json.loads(line)["step"] for line in bench.ledger_path.read_text().splitlines()]
        assert ledger == [1, 2, 3, 4]


def test_after_a_replay_with_other_bytes_the_next_step_starts_from_the_version_they_got(
    tmp_path: Path,
) -> None:
    """A GPU may round otherwise the second time: the store then gives the replayed step a number of its own."""
    script = ScriptedBatches(last_finished_step=2)
    with _bench(tmp_path, script=script, versions={2: 7}) as bench:
        bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
        assert bench.script.base_versions == [2, 2, 7]
        assert bench.progress.state.version == 8


def test_a_failing_publisher_ends_the_loop(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.store.failure = FencedError("a newer writer holds the log")
        with pytest.raises(FencedError, match="newer writer"):
            bench.run(last_step=50)
        assert len(bench.about("train")) <= 2
        assert bench.about("announce", "durable") == []
        assert bench.progress.state.phase is not Phase.FINISHED


def test_a_failing_publisher_ends_a_loop_that_waits_for_it(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.store.gate.clear()
        bench.store.failure = FencedError("a newer writer holds the log")

        def fail_while_waited_for() -> None:
            with _in_background(lambda: bench.run(last_step=50, checkpoint_every_steps=1)):
                eventually(lambda: "trained 1" in bench.events, what="the step to be taken")
                bench.store.gate.set()

        with pytest.raises(FencedError, match="newer writer"):
            fail_while_waited_for()
        assert bench.about("save", "durable") == []


def test_a_step_fenced_at_its_ack_is_not_published(tmp_path: Path) -> None:
    with _bench(tmp_path) as bench:
        bench.learner.on_train = lambda _: bench.script.fail(
            "AckBatch", FencedError("epoch 4 has the policy")
        )
        with pytest.raises(FencedError, match="epoch 4"):
            bench.run(last_step=5)
        assert bench.about("train", "trained", "publish") == ["train 1"]
        assert bench.progress.records_after(0) == []

"""The order of a step, what is published and when, replay, stopping, and failures beside training.

Batches come from a scripted server over real gRPC and versions leave through the real worker; the learner and
the store only write down what they were asked, into the same list of events.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import Client
from astraflow.errors import FencedError, PreconditionError, UnavailableError
from astraflow_trainer import controls, progress
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import BatchSource, Ledger
from astraflow_trainer.loop import LoopSettings, TrainingLoop
from astraflow_trainer.publish.publishing import ModelBytes, PublishWorker
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.step import Outcome, SkipReason, StepMetrics
from astraflow_weights.publish.announcing import Announcer
from support import scripted_batches
from support.scripted_batches import PATIENCE_S, eventually
from support.scripted_dataflow import POLICY, RUN_ID

FENCED = FencedError("a newer writer holds the log")
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
        self._step = int(rows[0].origin.task_id.removeprefix("task-")) if rows else self._step + 1
        self.events.append(f"train {self._step}")
        self.on_train(self._step)
        skipped = self._step in self.skips
        return StepMetrics(
            outcome=Outcome.SKIPPED if skipped else Outcome.COMMITTED,
            skip_reason=SkipReason.NO_SIGNAL if skipped else SkipReason.NONE,
            num_rows=len(rows),
            num_left_out=0,
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
        return scripted_batches.weights_of(self._step)

    def set_learning_rate(self, peak: float) -> None:
        self.events.append(f"rate {peak:g}")
        self.learning_rate = peak

    def stage(self, *, step: int, version: int) -> Callable[[], None]:
        self.events.append(f"stage {step}")

        def save() -> None:
            self.events.append(f"save {step} at version {version}")
            self.on_save(step)

        return save


class Bench:
    """Everything around a loop; what is set before `run` holds for it."""

    def __init__(self, client: Client, script: scripted_batches.ScriptedBatches, ledger_path: Path) -> None:
        self.script, self.events = script, script.events
        self.learner = Bookkeeper(script.events)
        self.store = scripted_batches.ScriptedStore(script.events)
        self.progress = progress.Progress()
        self.controls = controls.Controls()
        self.max_behind = 1
        self.ledger_path = ledger_path
        self._client = client

    def about(self, *kinds: str) -> list[str]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event.split()[0] in kinds]

    def versions(self) -> list[int | None]:
        """The version of each recorded step."""
        return [record.version for record in self.progress.records_after(0)]

    def ledger(self, key: str) -> list[object]:
        """One field of every line of the ledger."""
        return [json.loads(line)[key] for line in self.ledger_path.read_text().splitlines()]

    def run(self, **changes: Any) -> None:
        """Claim the policy and run the loop from the first step on, as the server does."""
        ledger = Ledger(self.ledger_path)
        source = BatchSource(self._client, run_id=RUN_ID, policy_id=POLICY, trainer_id="t", ledger=ledger)
        claim = source.claim()
        worker = PublishWorker(
            self.store,
            Announcer(self._client, run_id=RUN_ID, policy_id=POLICY, epoch=claim.epoch),
            policy_id=POLICY,
            max_behind=self.max_behind,
            published=lambda committed: self.progress.published(committed.version),
        )
        loop = TrainingLoop(
            source=RankBatches(source, OneRank()),
            learner=self.learner,
            publisher=worker,
            progress=self.progress,
            claim=claim,
            controls=self.controls,
        )
        settings: dict[str, Any] = {"first_step": 1, "version": 0, "published": {0: 0}}
        settings |= {"checkpoint_every_steps": 100, "checkpoint_every_s": 3600.0}
        with worker:
            loop.run(LoopSettings(**(settings | changes)))

    @contextmanager
    def running(self, **changes: Any) -> Iterator[None]:
        """Run the loop in a thread, as a trainer does; leaving waits for its end, and raises what it raised."""
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(self.run, **changes)
            yield
            running.result(PATIENCE_S)

    def until_waiting_for(self, reason: str) -> None:
        """Block until the loop waits for this."""
        eventually(lambda: self.progress.state.waiting_for == reason, what=f"the loop to wait for {reason}")

    def during(self, step: int, act: Callable[[], object]) -> None:
        """Act while this step is trained."""
        self.learner.on_train = lambda trained: act() if trained == step else None

    def poll_without_end(self, *, after_step: int) -> None:
        """Leave the trainer waiting for a batch after a step."""

        self.during(after_step, lambda: self.script.empty_polls.extend(["ready_groups"] * 10_000))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    script = scripted_batches.ScriptedBatches()
    with scripted_batches.serving(script) as client:
        bench = Bench(client, script, tmp_path / "ledger.jsonl")
        yield bench
        bench.store.gate.set()


def test_a_step_is_announced_to_the_server_before_and_after_training_and_then_published(bench: Bench) -> None:
    bench.run(last_step=1)
    wanted = ["acquire 1", "intent 1", "fetch 1", "train 1", "trained 1", "publish 1", "announce 1"]
    assert bench.about("acquire", "intent", "fetch", "train", "trained", "publish", "announce") == wanted


def test_each_step_starts_from_the_version_of_the_one_before(bench: Bench) -> None:
    bench.run(last_step=3)
    assert bench.script.base_versions == [0, 1, 2]
    assert bench.about("announce") == ["announce 1", "announce 2", "announce 3"]
    state = bench.progress.state
    assert (state.phase, state.step, state.version) == (progress.Phase.FINISHED, 3, 3)


def test_a_skipped_step_publishes_nothing_and_keeps_the_version(bench: Bench) -> None:
    bench.learner.skips = frozenset({2})
    bench.run(last_step=3)
    assert bench.script.base_versions == [0, 1, 1]
    assert bench.about("trained", "skipped") == ["trained 1", "skipped 2", "trained 3"]
    assert bench.about("publish") == ["publish 1", "publish 3"]
    assert bench.versions() == [1, None, 2]


def test_a_bad_batch_costs_no_step_and_a_bad_payload_its_group_alone(bench: Bench) -> None:
    bench.script.spoiled_batches.append(lambda batch: batch.items.pop())
    bench.script.spoil["t2-1"] = lambda _: b""
    bench.learner.skips = frozenset({2})
    bench.run(last_step=3)
    assert bench.about("nack", "train", "trained", "skipped") == [
        *("nack 1 b1 digest_mismatch", "train 1", "trained 1"),
        *("train 2", "skipped 2", "train 3", "trained 3"),
    ]
    names = ("num_quarantined_batches", "num_left_out_trajectories")
    numbers = [tuple(record.metrics[name] for name in names) for record in bench.progress.records_after(0)]
    assert numbers == [(1, 0), (0, 2), (0, 0)]


def test_a_finished_step_leaves_its_numbers(bench: Bench) -> None:
    bench.learner.skips = frozenset({2})
    bench.run(last_step=2)
    first, second = bench.progress.records_after(0)
    assert first.metrics["reward_mean"] == 0.5
    assert first.metrics["learning_rate"] == 0.25
    assert (first.metrics["num_trajectories"], first.metrics["num_tokens"]) == (2.0, 6.0)
    # The second trajectory of step 2 began one version before the step's.
    assert (second.metrics["staleness_mean"], second.metrics["staleness_max"]) == (0.5, 1.0)
    # The version passed while it was sampled, for the step's own sampled the rest of it.
    parts = [second.metrics[f"staleness_in_{place}_mean"] for place in ("flight", "queue")]
    assert parts == [0.5, 0.0]
    assert (first.metrics["skipped"], second.metrics["skipped"]) == (0.0, 1.0)
    assert first.wait_s >= 0.0
    assert first.train_s >= 0.0


@pytest.mark.parametrize("max_behind", [1, 2, 3])
def test_a_stalled_store_holds_training_up_only_when_max_behind_wait(bench: Bench, max_behind: int) -> None:
    bench.max_behind = max_behind
    steps = range(1, max_behind + 2)
    bench.store.gate.clear()
    with bench.running(last_step=max_behind + 3):
        bench.until_waiting_for("publish")
        held_from = time.monotonic()
        assert bench.progress.state.phase is progress.Phase.WAITING
        # Their records are there, and their versions are not even encoded.
        assert [record.step for record in bench.progress.records_after(0)] == [*steps]
        assert bench.about("train", "publish") == [f"train {step}" for step in steps]
        assert bench.about("acquire")[-1] == f"acquire {max_behind + 1}"
        held_s = time.monotonic() - held_from
        bench.store.gate.set()
    assert len(bench.about("announce")) == max_behind + 3
    first, held = (bench.progress.records_after(0)[step].metrics for step in (0, max_behind + 1))
    assert held["publish_wait_s"] >= held_s
    assert held["publish_blocked_s"] == held["publish_copy_s"] + held["publish_wait_s"]
    assert 0.0 < first["publish_copy_s"] <= first["publish_blocked_s"]


def test_steps_are_taken_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(bench: Bench) -> None:
    written = threading.Event()
    bench.learner.on_save = lambda step: eventually(written.is_set, what="the test") if step == 2 else None
    with bench.running(last_step=6, checkpoint_every_steps=2):
        # Step 4 is taken, its checkpoint is due, and that of step 2 is still being written.
        eventually(lambda: "trained 4" in bench.events, what="step 4")
        eventually(lambda: bench.progress.state.step == 4, what="the record of step 4")
        held_from = time.monotonic()
        assert bench.about("stage", "save", "durable") == ["stage 2", "save 2 at version 2"]
        assert bench.progress.state.durable_step == 0
        held_s = time.monotonic() - held_from
        written.set()
    assert bench.about("stage", "durable") == [
        *("stage 2", "durable 2", "stage 4", "durable 4", "stage 6", "durable 6")
    ]
    assert "train 5" not in bench.events[: bench.events.index("durable 2")]
    held = bench.progress.records_after(4)[0].metrics
    assert held["checkpoint_wait_s"] >= held_s
    assert held["checkpoint_blocked_s"] == held["checkpoint_copy_s"] + held["checkpoint_wait_s"]


@pytest.mark.parametrize("last_step", [1, 50])
def test_a_checkpoint_that_cannot_be_written_ends_training(bench: Bench, last_step: int) -> None:
    def fail(_step: int) -> None:
        raise OSError(28, "No space left on device")

    bench.learner.on_save = fail
    with pytest.raises(OSError, match="No space left"):
        bench.run(last_step=last_step, checkpoint_every_steps=1)
    assert bench.about("durable") == []
    assert len(bench.about("train")) <= 2
    assert bench.progress.state.phase is not progress.Phase.FINISHED


def test_training_that_fails_leaves_no_thread_that_writes_later(bench: Bench) -> None:
    """After a new claim in the same process the folder is somebody else's."""
    bench.store.gate.clear()

    def fail(step: int) -> None:
        if step == 2:
            raise FloatingPointError("no")

    bench.learner.on_train = fail
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(bench.run, last_step=3, checkpoint_every_steps=1)
        with pytest.raises(FloatingPointError):
            running.result(PATIENCE_S)
        bench.store.gate.set()
    assert "stage 1" in bench.events
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert bench.about("save", "durable") == []


def test_a_stop_request_ends_training_after_the_step_in_progress(bench: Bench) -> None:
    answers: list[int] = []
    bench.during(2, lambda: answers.append(bench.controls.stop_after_step()))
    bench.run(last_step=50)
    assert answers == [2]
    assert bench.about("acquire") == ["acquire 1", "acquire 2"]
    assert bench.about("announce") == ["announce 1", "announce 2"]
    assert bench.events[-1] == "durable 2"
    assert bench.progress.state.phase is progress.Phase.FINISHED


def test_a_run_that_is_over_ends_training_with_a_checkpoint_of_what_was_trained(bench: Bench) -> None:
    bench.during(2, lambda: bench.script.empty_polls.append("run_finished"))
    bench.run(last_step=50)
    assert bench.about("train", "durable") == ["train 1", "train 2", "durable 2"]
    assert bench.progress.state.phase is progress.Phase.FINISHED


def test_a_checkpoint_that_the_server_never_heard_of_is_told_at_the_end(bench: Bench) -> None:
    bench.script.last_finished_step = 3
    bench.run(first_step=4, last_step=3, version=3, published={0: 0, 3: 3})
    assert bench.about("durable") == ["durable 3"]


def test_a_stop_request_during_a_checkpoint_names_the_step_it_covers(bench: Bench) -> None:
    answers: list[int] = []

    def stop(step: int) -> None:
        if step == 3:
            answers.append(bench.controls.stop_after_step())

    bench.learner.on_save = stop
    bench.poll_without_end(after_step=3)
    bench.run(last_step=50, checkpoint_every_steps=3)
    assert answers == [3]
    assert bench.progress.state.step == 3
    assert bench.about("durable") == ["durable 3"]


def test_a_stop_request_while_waiting_for_a_batch_takes_no_further_step(bench: Bench) -> None:
    bench.poll_without_end(after_step=1)
    with bench.running(last_step=50):
        bench.until_waiting_for("ready_groups")
        assert bench.controls.stop_after_step() == 1
    assert bench.about("train", "durable") == ["train 1", "durable 1"]


def test_a_stop_request_before_the_first_step_does_nothing_at_all(bench: Bench) -> None:
    assert bench.controls.stop_after_step() == 0
    bench.run(last_step=50)
    assert bench.about("acquire", "train", "save", "durable") == []
    assert bench.progress.state.phase is progress.Phase.FINISHED


def test_a_paused_trainer_publishes_waits_with_a_reason_and_goes_on_when_told(bench: Bench) -> None:
    bench.during(2, lambda: bench.controls.pause("maintenance"))
    with bench.running(last_step=3):
        bench.until_waiting_for(controls.PAUSED)
        eventually(lambda: "announce 2" in bench.events, what="the version of the step before the pause")
        assert bench.progress.state.phase is progress.Phase.WAITING
        assert bench.about("acquire", "train") == ["acquire 1", "train 1", "acquire 2", "train 2"]
        assert bench.controls.pause_reason == "maintenance"
        assert bench.controls.resume() == 2
    assert bench.about("train")[-1] == "train 3"


def test_a_batch_that_comes_after_a_pause_was_promised_waits_for_its_end(bench: Bench) -> None:
    promised: list[int] = []

    def pause(step: int) -> None:
        if step == 2 and not promised:
            promised.append(bench.controls.pause("meanwhile"))

    bench.script.on_acquire = pause
    with bench.running(last_step=2):
        bench.until_waiting_for(controls.PAUSED)
        assert promised == [1]
        assert bench.about("train") == ["train 1"]
        bench.controls.resume()
    assert bench.about("train") == ["train 1", "train 2"]


def test_a_stop_request_ends_a_pause(bench: Bench) -> None:
    assert bench.controls.pause("before anything") == 0
    with bench.running(last_step=3):
        bench.until_waiting_for(controls.PAUSED)
        bench.controls.stop_after_step()
    assert bench.about("acquire", "train") == []


def test_a_checkpoint_asked_for_is_durable_when_answered_and_asking_again_does_nothing(bench: Bench) -> None:
    bench.poll_without_end(after_step=2)
    with bench.running(last_step=50):
        bench.until_waiting_for("ready_groups")
        assert bench.controls.checkpoint().result(PATIENCE_S) == 2
        assert "durable 2" in bench.events
        assert bench.progress.state.durable_step == 2
        assert bench.controls.checkpoint().result(PATIENCE_S) == 2
        bench.controls.stop_after_step()
    assert set(bench.about("save")) == {"save 2 at version 2"}


def test_a_checkpoint_is_written_during_a_pause_too(bench: Bench) -> None:
    bench.during(1, lambda: bench.controls.pause(""))
    with bench.running(last_step=50):
        bench.until_waiting_for(controls.PAUSED)
        assert bench.controls.checkpoint().result(PATIENCE_S) == 1
        assert bench.about("train") == ["train 1"]
        bench.controls.stop_after_step()


def test_a_learning_rate_holds_from_the_next_step_on_and_is_in_a_checkpoint_before_that(bench: Bench) -> None:
    asked: list[Future[controls.RateChange]] = []
    bench.during(2, lambda: asked.append(bench.controls.set_learning_rate(0.125)))
    bench.run(last_step=3)
    assert asked[0].result(0) == controls.RateChange(first_step=3, previous=0.25)
    wanted = ["train 2", "rate 0.125", "save 2 at version 2", "durable 2", "train 3"]
    assert bench.about("train", "rate", "save", "durable")[1:6] == wanted
    rates = [record.metrics["learning_rate"] for record in bench.progress.records_after(0)]
    assert rates == [0.25, 0.25, 0.125]
    assert bench.progress.state.learning_rate == 0.125


def test_a_replay_is_not_crossed_by_a_new_learning_rate(bench: Bench) -> None:
    bench.script.last_finished_step = bench.store.newest = 2
    bench.store.versions = {1: 1, 2: 2}
    bench.during(1, lambda: bench.controls.set_learning_rate(0.125))
    bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
    assert bench.about("train", "rate") == ["train 1", "train 2", "rate 0.125", "train 3"]


def test_whoever_waits_when_training_fails_is_told(bench: Bench) -> None:
    asked: list[Future[int]] = []

    def fail(_step: int) -> None:
        asked.append(bench.controls.checkpoint())
        raise FloatingPointError("no")

    bench.learner.on_train = fail
    with pytest.raises(FloatingPointError):
        bench.run(last_step=3)
    with pytest.raises(UnavailableError, match="the trainer is ending: no"):
        asked[0].result(0)


def test_whoever_asks_after_the_end_is_told(bench: Bench) -> None:
    bench.run(last_step=1)
    with pytest.raises(PreconditionError, match="ended after step 1"):
        bench.controls.checkpoint()


def test_a_checkpoint_covers_only_announced_versions_and_a_step_is_durable_after_it(bench: Bench) -> None:
    """Else a crash between the two would lose a version: no checkpoint leads back to its step."""
    bench.store.gate.clear()
    with bench.running(last_step=1, checkpoint_every_steps=1):
        eventually(lambda: "trained 1" in bench.events, what="the step to be taken")
        assert bench.about("save", "durable") == []
        bench.store.gate.set()
    assert bench.about("save", "announce", "durable") == ["announce 1", "save 1 at version 1", "durable 1"]


def test_a_replayed_step_counts_as_it_was_recorded(bench: Bench) -> None:
    """On a GPU the guard may decide otherwise the second time; the server has counted already."""
    bench.script.last_finished_step = 2
    bench.learner.skips = frozenset({2})
    bench.run(last_step=3)
    assert bench.about("publish") == ["publish 1", "publish 2", "publish 3"]
    assert bench.ledger("stage") == ["TRAINED", "TRAINED", "TRAINED"]


def test_steps_that_the_server_forgot_are_taken_and_published_again(bench: Bench) -> None:
    """Versions 1 and 2 are in the store, their steps are not finished: Redis lost its tail."""
    bench.store.versions = {1: 3, 2: 4}
    bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
    wanted = ["trained 1", "publish 1", "trained 2", "publish 2", "trained 3", "publish 3"]
    assert bench.about("trained", "publish") == wanted
    assert bench.versions() == [3, 4, 5]
    assert bench.script.base_versions == [2, 3, 4]


def test_while_nodes_wait_for_a_forgotten_version_it_is_announced_again(bench: Bench) -> None:
    bench.learner.skips = frozenset({2})

    def forget_then_hear_again(step: int) -> None:
        if step == 2:
            eventually(lambda: len(bench.script.announced) == 1, what="version 1 to be announced")
            bench.script.announced.clear()
            bench.script.empty_polls.append("ready_groups")
        if step == 3:
            eventually(lambda: bench.script.announced, what="version 1 to be announced again")

    bench.learner.on_train = forget_then_hear_again
    bench.run(last_step=3)
    assert [version.version for version in bench.script.announced] == [1, 2]


def test_checkpoints_come_at_their_interval_and_at_the_end(bench: Bench) -> None:
    bench.learner.skips = frozenset({4})
    bench.run(last_step=5, checkpoint_every_steps=2)
    assert bench.about("save") == ["save 2 at version 2", "save 4 at version 3", "save 5 at version 4"]
    assert bench.about("durable") == ["durable 2", "durable 4", "durable 5"]


def test_a_checkpoint_that_is_too_old_is_followed_by_another_before_the_next_step(bench: Bench) -> None:
    bench.run(last_step=3, checkpoint_every_s=0.0)
    wanted = ["train 1", "stage 1", "train 2", "stage 2", "train 3", "stage 3"]
    assert bench.about("train", "stage") == wanted
    assert bench.about("durable") == ["durable 1", "durable 2", "durable 3"]


def test_an_end_that_a_checkpoint_covers_needs_no_other(bench: Bench) -> None:
    bench.run(last_step=4, checkpoint_every_steps=2)
    assert bench.about("durable") == ["durable 2", "durable 4"]


def test_replayed_steps_are_trained_again_but_neither_acked_nor_published_again(bench: Bench) -> None:
    """Steps 1 to 3 were acked, and step 2 published, before the process died without a checkpoint."""
    bench.script.last_finished_step, bench.store.versions = 3, {2: 2}
    bench.run(last_step=4, published={0: 0, 1: 1, 2: 2})
    assert bench.about("train") == ["train 1", "train 2", "train 3", "train 4"]
    assert bench.about("intent", "trained") == ["intent 4", "trained 4"]
    assert bench.about("publish") == ["publish 2", "publish 3", "publish 4"]
    # Of replayed steps the server ignores it: they are bound.
    assert bench.script.base_versions == [2, 2, 2, 3]
    assert bench.versions() == [1, 2, 3, 4]
    assert bench.ledger("step") == [1, 2, 3, 4]


def test_after_a_replay_with_other_bytes_the_next_step_starts_from_the_version_they_got(bench: Bench) -> None:
    """A GPU may round otherwise the second time: the store then gives the replayed step a number of its own."""
    bench.script.last_finished_step, bench.store.versions = 2, {2: 7}
    bench.run(last_step=3, published={0: 0, 1: 1, 2: 2})
    assert bench.script.base_versions == [2, 2, 7]
    assert bench.progress.state.version == 8


def test_a_failing_publisher_ends_the_loop(bench: Bench) -> None:
    bench.store.failures.append(FENCED)
    with pytest.raises(FencedError, match="newer writer"):
        bench.run(last_step=50)
    assert len(bench.about("train")) <= 2
    assert bench.about("announce", "durable") == []
    assert bench.progress.state.phase is not progress.Phase.FINISHED


def test_a_failing_publisher_ends_a_loop_that_waits_for_it(bench: Bench) -> None:
    bench.store.gate.clear()
    bench.store.failures.append(FENCED)

    def fail_while_waited_for() -> None:
        with bench.running(last_step=50, checkpoint_every_steps=1):
            eventually(lambda: "trained 1" in bench.events, what="the step to be taken")
            bench.store.gate.set()

    with pytest.raises(FencedError, match="newer writer"):
        fail_while_waited_for()
    assert bench.about("save", "durable") == []


def test_a_step_fenced_at_its_ack_is_not_published(bench: Bench) -> None:
    bench.learner.on_train = lambda _: bench.script.fail("AckBatch", FencedError("epoch 4 has the policy"))
    with pytest.raises(FencedError, match="epoch 4"):
        bench.run(last_step=5)
    assert bench.about("train", "trained", "publish") == ["train 1"]
    assert bench.progress.records_after(0) == []

"""Snapshots of a trainer, its finished steps, its share of waiting, and waking readers in an event loop."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from astraflow_trainer.controls import PAUSED
from astraflow_trainer.progress import Phase, Progress, State, StepRecord

METRICS = {"reward_mean": 0.5}
RECORD = StepRecord(step=1, version=1, finished_at_s=10.0, wait_s=1.0, train_s=2.0, metrics=METRICS)


@pytest.fixture
def progress() -> Progress:
    return Progress()


def test_starting_up_tells_what_it_is_busy_with_and_how_far_it_is(progress: Progress) -> None:
    progress.starting("warm_start", detail="supervised", fraction=0.25)
    begun = State(phase=Phase.STARTING, waiting_for="warm_start", detail="supervised", fraction=0.25)
    assert progress.state == begun


def test_waiting_names_its_reason_until_training_begins(progress: Progress) -> None:
    progress.waiting("publish")
    progress.waiting("ready_groups")
    assert (progress.state.phase, progress.state.waiting_for) == (Phase.WAITING, "ready_groups")
    progress.training()
    assert (progress.state.phase, progress.state.waiting_for) == (Phase.TRAINING, "")


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.FINISHED])
def test_an_end_waits_for_nothing(progress: Progress, phase: Phase) -> None:
    progress.waiting("batch")
    progress.ended(phase)
    assert (progress.state.phase, progress.state.waiting_for) == (phase, "")


def test_a_snapshot_does_not_change_with_the_trainer(progress: Progress) -> None:
    before = progress.state
    progress.published(4)
    assert (before.version, progress.state.version) == (None, 4)


def test_finished_steps_are_kept_in_order_and_read_from_any_point(progress: Progress) -> None:
    records = [replace(RECORD, step=step) for step in (1, 2, 3)]
    for record in records:
        progress.stepped(record)
    assert progress.state.step == 3
    assert progress.records_after(0) == records
    assert progress.records_after(2) == records[2:]
    assert progress.records_after(3) == []


def test_the_share_of_waiting_is_zero_before_the_first_wait_and_one_until_its_end(progress: Progress) -> None:
    assert progress.wait_fraction() == 0.0
    progress.waiting("batch")
    progress.waiting("ready_groups")
    assert progress.wait_fraction() == pytest.approx(1.0)


def test_the_share_of_waiting_falls_while_the_trainer_works(progress: Progress) -> None:
    progress.waiting("batch")
    progress.training()
    first = progress.wait_fraction()
    while progress.wait_fraction() == first:  # until the clock has moved on
        pass
    assert 0.0 <= progress.wait_fraction() < first <= 1.0


def test_a_pause_counts_neither_as_waiting_nor_as_time(progress: Progress) -> None:
    progress.waiting("batch")
    progress.training()
    progress.waiting(PAUSED)
    first = progress.wait_fraction()
    paused_at = time.monotonic()
    while time.monotonic() < paused_at + 0.01:
        progress.waiting(PAUSED)
    assert progress.wait_fraction() == first
    progress.training()
    assert progress.wait_fraction() <= first


async def test_a_change_in_another_thread_wakes_every_reader(progress: Progress) -> None:
    readers = [asyncio.create_task(progress.changed(timeout_s=20.0)) for _ in range(2)]
    await asyncio.sleep(0)
    writer = threading.Thread(target=progress.published, args=(1,))
    writer.start()
    async with asyncio.timeout(10.0):
        await asyncio.gather(*readers)
    writer.join()


async def test_without_a_change_a_reader_returns_after_its_timeout(progress: Progress) -> None:
    await progress.changed(timeout_s=0.01)
    progress.published(1)  # nobody is left to be woken

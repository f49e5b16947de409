"""A trainer says that it lives, and what it waits for, from its start to its release, against a scripted server."""

import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow import errors
from astraflow_trainer.controls import PAUSED
from astraflow_trainer.heartbeat import Heartbeat, Report, descriptors_report, report_of
from astraflow_trainer.progress import Phase, Progress, State
from support.scripted_batches import ScriptedBatches, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID

MISSING = State(phase=Phase.TRAINING, store_wait="store_missing", store_detail="file:///x is not mounted")


@pytest.mark.parametrize(
    ("state", "report"),
    [
        (State(), Report()),
        (State(Phase.STARTING, "warm_start", 0.45, detail="steps"), Report("warm_start", "steps", 0.45)),
        (State(Phase.WAITING, "ready_groups"), Report()),
        (State(Phase.WAITING, PAUSED), Report("paused")),
        (State(Phase.TRAINING, hung="in sum"), Report("trainer_hung", "in sum")),
        (MISSING, Report("store_missing", "file:///x is not mounted")),
    ],
)
def test_only_what_the_server_does_not_see_itself_is_told(state: State, report: Report) -> None:
    assert report_of(state) == report


def test_a_process_that_can_open_nothing_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptors_report() is None
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr("resource.getrlimit", lambda _: (num_open, hard))
    report = descriptors_report()
    assert report is not None
    assert report.waiting_for == "descriptors_exhausted"
    assert f" of {num_open} file descriptors" in report.detail


def test_a_full_table_of_descriptors_cannot_even_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    report = descriptors_report()
    assert report is not None
    assert report.waiting_for == "descriptors_exhausted"


@pytest.fixture
def script() -> ScriptedBatches:
    return ScriptedBatches()


@pytest.fixture
def beating(script: ScriptedBatches) -> Iterator[tuple[Heartbeat, Progress]]:
    progress = Progress()
    with serving(script) as client:
        heartbeat = Heartbeat(client, run_id=RUN_ID, policy_id=POLICY, progress=progress)
        with heartbeat:
            yield heartbeat, progress


def test_it_is_told_before_the_claim_how_far_the_start_is_and_when_that_is_over(
    script: ScriptedBatches, beating: tuple[Heartbeat, Progress]
) -> None:
    _, progress = beating
    progress.starting("warm_start", detail="steps", fraction=0.25)
    eventually(lambda: script.holds, what="the start")
    assert [(hold.trainer_epoch, hold.waiting_for, hold.progress) for hold in script.holds] == [
        (0, "warm_start", 0.25)
    ]
    progress.starting("warm_start", detail="steps", fraction=0.75)
    eventually(lambda: script.holds[-1].progress == 0.75, what="that it is further")
    progress.training()
    eventually(lambda: not script.holds[-1].waiting_for, what="its end")


def test_a_claimed_policy_is_held_until_it_is_released(
    script: ScriptedBatches, beating: tuple[Heartbeat, Progress]
) -> None:
    heartbeat, _ = beating
    script.fail("HoldPolicy", errors.UnavailableError("restarting"), errors.FencedError("a newer trainer"))
    heartbeat.holds(3, lease_s=0.1)
    eventually(lambda: len(script.holds) >= 3, what="a sign of life after failed ones")
    heartbeat.released()
    assert {hold.trainer_epoch for hold in script.holds} == {3}

"""What is remembered of steps that raise: alike or not, of the batch or not, on any rank, across processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import (
    FencedError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PluginError,
    UnavailableError,
)
from astraflow_trainer.batches.failed_steps import FailedSteps
from astraflow_trainer.ranks.watch import RankLostError

BATCH, OTHER = (batch_pb2.Batch(batch_id=name, step=3, digest=name.encode()) for name in ("b-3-1", "b-3-2"))


def itself(error: BaseException) -> BaseException:
    """This rank ended by itself."""
    return error


def fail(
    error: BaseException,
    folder: Path,
    *,
    batch: batch_pb2.Batch = BATCH,
    own: Path | None = None,
    explain: Callable[[BaseException], BaseException] = itself,
) -> BaseException:
    """One process whose step raises; what it ends with."""
    failed = FailedSteps(folder, own=own, explain=explain)
    with pytest.raises(BaseException) as ended, failed.trying(batch):  # noqa: PT011 - whatever it is
        raise error
    return ended.value


def problem(folder: Path, batch: batch_pb2.Batch = BATCH) -> str:
    """Why another process would not try a batch; empty when it would."""
    found = FailedSteps(folder, explain=itself).problem(batch, was_trained=False)
    return found.detail if found else ""


def out_of_memory(error: BaseException) -> BaseException:
    """What a rank says of a GPU that is too small."""
    return InvalidArgumentError(f"rank 0 has too little memory on cuda:0: {error}. Take more ranks")


OF_THE_BATCH = {
    "any exception": (ValueError("no"), itself, r"ValueError: no \(test_failed_steps\.py:\d+ in fail\)"),
    "host memory": (MemoryError(), itself, r"MemoryError"),
    "a plug-in": (
        PluginError("loss plug-in 'x' raised ValueError: no (recipe.py:3 in f)"),
        itself,
        r"recipe\.py:3",
    ),
    "what the server refuses": (InvalidArgumentError("metrics"), itself, "metrics"),
    "a GPU's memory": (torch.OutOfMemoryError("2 GiB"), out_of_memory, "Take more ranks"),
}


@pytest.mark.parametrize(("error", "explain", "said"), OF_THE_BATCH.values(), ids=OF_THE_BATCH)
def test_a_batch_that_fails_twice_alike_is_tried_no_more(
    tmp_path: Path, error: Exception, explain: Callable[[BaseException], BaseException], said: str
) -> None:
    for words in ("it is tried once more", "it is quarantined"):
        assert problem(tmp_path) == ""
        ended = fail(error, tmp_path, explain=explain)
        assert isinstance(ended, InternalError), "its supervisor starts it again"
        assert words in ended.message
    with pytest.raises(AssertionError, match=f"^step 3 failed 2 times alike: .*{said}"):
        raise AssertionError(problem(tmp_path))
    assert problem(tmp_path, OTHER) == ""
    with pytest.raises(InvalidArgumentError, match="it was trained on batch b-3-1 before"):
        FailedSteps(tmp_path, explain=itself).problem(BATCH, was_trained=True)


NOT_OF_IT = {
    "a server that is gone": (UnavailableError("gone"), itself),
    "another trainer": (FencedError("newer"), itself),
    "a batch that was voided": (NotFoundError("not bound"), itself),
    "a rank that was killed": (
        RuntimeError("Connection closed by peer"),
        lambda _: RankLostError("rank 1 exited"),
    ),
    "an end by the user": (KeyboardInterrupt(), itself),
}


@pytest.mark.parametrize(("error", "explain"), NOT_OF_IT.values(), ids=NOT_OF_IT)
def test_what_is_not_of_the_batch_counts_never(
    tmp_path: Path, error: BaseException, explain: Callable[[BaseException], BaseException]
) -> None:
    for _ in range(3):
        assert fail(error, tmp_path, explain=explain) is error
    assert problem(tmp_path) == ""
    assert not list(tmp_path.iterdir())


def lost_gpu(error: BaseException) -> BaseException:
    """What a rank says of a GPU that fell off the bus, whatever drove it to that."""
    return UnavailableError(str(error))


_KILLED: list[object] = []


def killed(folder: Path, *, own: Path | None = None) -> None:
    """A process that ends within the step and says nothing: it hung, or memory was too small for it."""
    trying = FailedSteps(folder, own=own, explain=itself).trying(BATCH)
    trying.__enter__()
    _KILLED.append(trying)  # what is collected as garbage would leave the block


def other_rank_ends(folder: Path) -> None:
    """The second rank's process ends, and the first one's with it."""
    killed(folder, own=folder / "rank-1")
    fail(RuntimeError("gloo"), folder, explain=lambda _: RankLostError("rank 1 exited"))


# Mostly they are not of the batch. When all tries of it end so, it is, or nobody will ever train on it.
ENDS_WITHOUT_A_REASON: dict[str, tuple[Callable[[Path], object], str]] = {
    "a process that is killed or hangs": (killed, "no process said why"),
    "a GPU that is lost": (
        lambda folder: fail(torch.AcceleratorError("ECC"), folder, explain=lost_gpu),
        "no process said why",
    ),
    "another rank that is killed or hangs": (
        other_rank_ends,
        "no process said why",
    ),
}


@pytest.mark.parametrize(("end", "said"), ENDS_WITHOUT_A_REASON.values(), ids=ENDS_WITHOUT_A_REASON)
def test_a_batch_that_was_begun_five_times_and_never_finished_is_tried_no_more(
    tmp_path: Path, end: Callable[[Path], object], said: str
) -> None:
    (tmp_path / "rank-1").mkdir()
    for _ in range(5):
        assert problem(tmp_path) == ""
        end(tmp_path)
    assert problem(tmp_path).startswith("step 3 was begun 5 times and never ended")
    assert said in problem(tmp_path)
    assert problem(tmp_path, OTHER) == ""


def test_a_batch_that_fails_in_another_way_each_time_is_tried_five_times(tmp_path: Path) -> None:
    for error in (ValueError("a"), KeyError("b"), TypeError("c"), IndexError("d"), OSError("e")):
        assert problem(tmp_path) == ""
        fail(error, tmp_path)
    assert "ValueError: a" in problem(tmp_path)
    assert "OSError: e" in problem(tmp_path)


def test_what_a_restart_replays_before_it_does_not_make_a_batch_forgotten(tmp_path: Path) -> None:
    earlier = batch_pb2.Batch(batch_id="b-2-1", step=2, digest=b"b-2-1")
    for _ in range(2):
        assert problem(tmp_path) == ""
        with FailedSteps(tmp_path, explain=itself).trying(earlier):
            pass
        fail(ValueError("no"), tmp_path)
    assert "2 times" in problem(tmp_path)


def test_a_failure_of_another_kind_begins_anew_and_is_counted_beside_the_first(tmp_path: Path) -> None:
    for error, expected in ((ValueError("a"), ""), (KeyError("b"), ""), (ValueError("c"), "ValueError: c")):
        fail(error, tmp_path)
        assert expected in problem(tmp_path)
    assert problem(tmp_path)


def test_what_began_it_decides_whether_two_ends_are_alike(tmp_path: Path) -> None:
    for cause in (ValueError("no"), KeyError("k")):
        wrapped = PluginError("the loss raised")
        wrapped.__cause__ = cause
        fail(wrapped, tmp_path)
    assert problem(tmp_path) == ""


def test_a_step_that_ends_well_is_forgotten_and_no_batch_counts_for_another(tmp_path: Path) -> None:
    fail(ValueError("no"), tmp_path, batch=OTHER)
    fail(ValueError("no"), tmp_path)
    assert problem(tmp_path) == "", "the batch that failed before was another"
    with FailedSteps(tmp_path, explain=itself).trying(BATCH):
        pass
    assert not list(tmp_path.iterdir())


def test_the_first_rank_hears_of_what_another_rank_met(tmp_path: Path) -> None:
    own = tmp_path / "rank-2"
    own.mkdir()
    for _ in range(2):
        fail(ValueError("no"), tmp_path, own=own)
    assert "ValueError" in problem(tmp_path)


def test_a_file_that_the_disk_damaged_counts_anew(tmp_path: Path) -> None:
    for content in (
        "",
        "[]",
        '{"batches": ["a"]}',
        '{"batches": {"a": {"step": 1, "begun": 1, "ends": {"a": 1}}}}',
    ):
        (tmp_path / "failed-step.json").write_text(content)
        assert problem(tmp_path) == ""


def test_a_process_that_dies_while_it_writes_leaves_what_was_known(tmp_path: Path) -> None:
    fail(ValueError("no"), tmp_path)
    (tmp_path / "failed-step.partial").write_text('{"batches": "')
    fail(ValueError("no"), tmp_path)
    assert "2 times" in problem(tmp_path)
    assert list(json.loads((tmp_path / "failed-step.json").read_text())["batches"]) == [BATCH.digest.hex()]

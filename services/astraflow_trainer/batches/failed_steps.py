"""Batches whose step raises: how each ended, kept in the work folder, so that one that fails twice alike is found.

Invariant: a rank writes its own file alone, before its process ends; the first rank reads those of all when it acquires
a batch. What is not of the batch does not count: a server or a rank that is gone, another trainer, a GPU that is lost,
a process that was killed. Called by the batch source, and around what a step does from its intent to its ack.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import (
    AstraflowError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionError_,
    RetryableError,
    StateError,
    UnauthenticatedError,
)
from astraflow.training.accepting import BadBatch
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import describe

log = get_logger(__name__)

_STEP_FAILED = "step_failed"
_MAX_ALIKE = 2
_FILE = "failed-step.json"
_ELSEWHERE = (RetryableError, StateError, NotFoundError, UnauthenticatedError, PermissionError_)
_PLACE = re.compile(r"\((\S+:\d+ in [^()]+)\)$")


class FailedSteps:
    """What is known of a batch that failed, across restarts."""

    def __init__(
        self, work_dir: Path, *, own: Path | None = None, explain: Callable[[BaseException], BaseException]
    ) -> None:
        """`own` is this rank's folder below `work_dir`. `explain` returns why a rank ends that raises an error: another
        one where that is only what the end of another rank, or of its GPU, led to.
        """
        self._work_dir, self._file, self._explain = work_dir, (own or work_dir) / _FILE, explain

    def problem(self, batch: batch_pb2.Batch, *, was_trained: bool) -> BadBatch | None:
        """Why nobody should try this batch again; None where it has not failed twice alike on any rank.

        Raises InvalidArgumentError for one that was trained on before.
        """
        for path in (self._work_dir / _FILE, *self._work_dir.glob(f"rank-*/{_FILE}")):
            for times, detail in _ends_of(path, batch).values():
                if times >= _MAX_ALIKE:
                    said = f"step {batch.step} failed {times} times alike: {detail}"
                    if was_trained:
                        raise InvalidArgumentError(
                            f"{said}; it was trained on batch {batch.batch_id} before, so no other can take its place: "
                            "correct what it says, and start the trainer again"
                        )
                    return BadBatch(_STEP_FAILED, said)
        return None

    @contextmanager
    def trying(self, batch: batch_pb2.Batch) -> Iterator[None]:
        """Note how the block ends. What is of the batch is raised as InternalError, for a restart may mend it once."""
        try:
            yield
        except Exception as error:  # whatever it is, it may be of the batch
            cause = self._explain(error)
            if isinstance(cause, _ELSEWHERE):
                raise
            detail = cause.message if isinstance(cause, AstraflowError) else describe(error)
            times = self._note(batch, _kind(error), detail)
            then = (
                "it is tried once more"
                if times < _MAX_ALIKE
                else "it is quarantined, and another takes its place"
            )
            log.error("step.failed", batch_id=batch.batch_id, times=times, detail=detail)
            raise InternalError(
                f"step {batch.step} failed on batch {batch.batch_id} ({times} of {_MAX_ALIKE} times alike): {detail}; "
                f"start the trainer again: {then}"
            ) from error
        self._file.unlink(missing_ok=True)

    def _note(self, batch: batch_pb2.Batch, kind: str, detail: str) -> int:
        ends = _ends_of(self._file, batch)
        times = ends.get(kind, (0, ""))[0] + 1
        ends[kind] = (times, detail)
        written = self._file.with_suffix(".partial")
        with written.open("w", encoding="utf-8") as file:
            json.dump({"digest": batch.digest.hex(), "ends": ends}, file)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._file)
        return times


def _ends_of(path: Path, batch: batch_pb2.Batch) -> dict[str, tuple[int, str]]:
    """How often a batch ended in which way, and what was said, as a file has it; nothing of another batch."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        ends = {kind: (int(times), str(detail)) for kind, (times, detail) in known["ends"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("failed_step.damaged", path=str(path), error=describe(error))
        return {}
    return ends if known["digest"] == batch.digest.hex() else {}


def _kind(error: BaseException) -> str:
    """What ends that are alike have in common: the exception that began it, and its place."""
    while error.__cause__ is not None:
        error = error.__cause__
    place = _PLACE.search(describe(error))
    return f"{type(error).__name__} {place[1] if place else ''}"

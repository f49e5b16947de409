"""Batches whose step raises or never ends: kept in the work folder, so that one that is never trained on is found.

Invariant: a rank writes its own file alone, before its process ends; the first rank reads those of all when it acquires
a batch. Two ends alike are enough; whatever the ends are, and also where the process said nothing (it hung, it was
killed, it lost its GPU), a batch is begun `_MAX_BEGUN` times at most. What is not of the batch does not count: a server
or another rank that is gone, another trainer, an end by the user. Called by the batch source, and around what a step
does from its intent to its ack.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from astraflow_trainer.ranks.watch import RankLostError

log = get_logger(__name__)

_STEP_FAILED = "step_failed"
_MAX_ALIKE = 2
_MAX_BEGUN = 5
"""Larger than `_MAX_ALIKE`: a process that is killed, or a GPU that is lost, is mostly not of the batch."""
_FILE = "failed-step.json"
_ELSEWHERE = (RetryableError, StateError, NotFoundError, UnauthenticatedError, PermissionError_)
_PLACE = re.compile(r"\((\S+:\d+ in [^()]+)\)$")


@dataclass
class _Tries:
    """What is known of one batch on one rank."""

    step: int
    begun: int = 0
    """How often its step was begun and not finished."""
    ends: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How often it ended in which way, and what was said."""

    @property
    def problem(self) -> str:
        """Why nobody should try it again; empty where somebody should."""
        for times, detail in self.ends.values():
            if times >= _MAX_ALIKE:
                return f"step {self.step} failed {times} times alike: {detail}"
        if self.begun < _MAX_BEGUN:
            return ""
        said = "; ".join(detail for _, detail in self.ends.values()) or "no process said why"
        return (
            f"step {self.step} was begun {self.begun} times and never ended, for its process hung, was killed (memory "
            f"may be too small), lost its GPU or failed otherwise each time: {said}"
        )


class FailedSteps:
    """What is known of batches that were not trained on, across restarts."""

    def __init__(
        self, work_dir: Path, *, own: Path | None = None, explain: Callable[[BaseException], BaseException]
    ) -> None:
        """`own` is this rank's folder below `work_dir`. `explain` returns why a rank ends that raises an error: another
        one where that is only what the end of another rank, or of its GPU, led to.
        """
        self._work_dir, self._file, self._explain = work_dir, (own or work_dir) / _FILE, explain

    def problem(self, batch: batch_pb2.Batch, *, was_trained: bool) -> BadBatch | None:
        """Why nobody should try this batch again; None where it has not failed twice alike, nor was begun too often, on
        any rank.

        Raises InvalidArgumentError for one that was trained on before.
        """
        for path in (self._work_dir / _FILE, *self._work_dir.glob(f"rank-*/{_FILE}")):
            known = _known(path).get(batch.digest.hex())
            if known is not None and (said := known.problem):
                if was_trained:
                    raise InvalidArgumentError(
                        f"{said}; it was trained on batch {batch.batch_id} before, so no other can take its place: "
                        "correct what it says, and start the trainer again"
                    )
                return BadBatch(_STEP_FAILED, said)
        return None

    @contextmanager
    def trying(self, batch: batch_pb2.Batch) -> Iterator[None]:
        """Note that the block begins, and how it ends. What is of the batch is raised as InternalError, for a restart
        may mend it once.
        """
        name, known = batch.digest.hex(), _known(self._file)
        tries = known.setdefault(name, _Tries(batch.step))
        tries.begun += 1
        self._write(known)
        try:
            yield
        except Exception as error:  # whatever it is, it may be of the batch
            cause = self._explain(error)
            if isinstance(error, _ELSEWHERE) or isinstance(cause, RankLostError):
                self._forget_begin(known, name)  # a rank that is lost has counted it itself
                raise
            if isinstance(cause, _ELSEWHERE):
                raise
            detail = cause.message if isinstance(cause, AstraflowError) else describe(error)
            times = tries.ends.get(_kind(error), (0, ""))[0] + 1
            tries.ends[_kind(error)] = times, detail
            self._write(known, is_synced=True)
            then = (
                "it is quarantined, and another takes its place" if tries.problem else "it is tried once more"
            )
            log.error("step.failed", batch_id=batch.batch_id, times=times, detail=detail)
            raise InternalError(
                f"step {batch.step} failed on batch {batch.batch_id} ({times} of {_MAX_ALIKE} times alike): {detail}; "
                f"start the trainer again: {then}"
            ) from error
        except BaseException:
            self._forget_begin(known, name)
            raise
        # Later ones stay: until one of them is trained on, each restart replays what was before it.
        self._write({name: tries for name, tries in known.items() if tries.step > batch.step})

    def _forget_begin(self, known: dict[str, _Tries], name: str) -> None:
        known[name].begun -= 1
        self._write({name: tries for name, tries in known.items() if tries.begun})

    def _write(self, known: Mapping[str, _Tries], *, is_synced: bool = False) -> None:
        """Replace the file; what the death of the process alone must not undo need not be `is_synced`."""
        if not known:
            self._file.unlink(missing_ok=True)
            return
        written = self._file.with_suffix(".partial")
        with written.open("w", encoding="utf-8") as file:
            json.dump({"batches": {name: asdict(tries) for name, tries in known.items()}}, file)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        written.replace(self._file)


def _known(path: Path) -> dict[str, _Tries]:
    """What a file says, by the digest of the batch."""
    if not path.exists():
        return {}
    try:
        batches = json.loads(path.read_text(encoding="utf-8"))["batches"]
        return {
            str(name): _Tries(
                int(tries["step"]),
                int(tries["begun"]),
                {kind: (int(times), str(detail)) for kind, (times, detail) in tries["ends"].items()},
            )
            for name, tries in batches.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("failed_step.damaged", path=str(path), error=describe(error))
        return {}


def _kind(error: BaseException) -> str:
    """What ends that are alike have in common: the exception that began it, and its place."""
    while error.__cause__ is not None:
        error = error.__cause__
    place = _PLACE.search(describe(error))
    return f"{type(error).__name__} {place[1] if place else ''}"

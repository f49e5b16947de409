"""Signs of life of a trainer: it tells the server that it holds its policy, and what only it knows that it waits for.

Invariant: the report is at most two seconds old while a trainer waits for something that the server cannot see (a
model that is made, a store that is not mounted), also before the policy is claimed. Nothing depends on an answer.
One thread for the life of a trainer; started by `server`; `session` says what is claimed.
"""

from __future__ import annotations

import errno
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from astraflow.client import Client, RetryPolicy
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_trainer.controls import PAUSED
from astraflow_trainer.progress import Phase, Progress, State

log = get_logger(__name__)

_LOOK_S, _REPEAT_S = 0.25, 2.0
_TIMEOUT_S, _ONCE = 5.0, RetryPolicy(total_s=0)
_MIN_PERIOD_S = 0.2
_TELLING_SHARE = 0.01
_FREE_DESCRIPTORS = 4
_OPEN = Path("/proc/self/fd")


@dataclass(frozen=True)
class Report:
    """What a trainer waits for, as HoldPolicyRequest has it."""

    waiting_for: str = ""
    detail: str = ""
    progress: float | None = None

    def is_news_after(self, before: Report) -> bool:
        """Whether a person would want to hear it at once."""
        moved = abs((self.progress or 0.0) - (before.progress or 0.0)) >= _TELLING_SHARE
        return self.waiting_for != before.waiting_for or moved


def report_of(state: State) -> Report:
    """What the server must hear of a trainer in this state; nothing of what the server sees itself."""
    if state.hung:
        return Report("trainer_hung", state.hung)
    if state.store_wait:
        return Report(state.store_wait, state.store_detail)
    if state.phase is Phase.STARTING and state.waiting_for:
        return Report(state.waiting_for, state.detail, state.fraction)
    return Report(PAUSED) if state.waiting_for == PAUSED else Report()


def descriptors_report() -> Report | None:
    """That the process can open nothing more: what fails of it then fails in many places, none of which says why."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(list(_OPEN.iterdir()))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return None  # no Linux: nothing is known
        num_open = limit
    if num_open < limit - _FREE_DESCRIPTORS:
        return None
    return Report("descriptors_exhausted", f"the trainer has {num_open} of {limit} file descriptors open")


class Heartbeat:
    """The thread that tells. Use as a context manager; leaving says nothing to the server."""

    def __init__(self, client: Client, *, run_id: str, policy_id: str, progress: Progress) -> None:
        self._client = client
        self._names = {"run_id": run_id, "policy_id": policy_id}
        self._progress = progress
        self._epoch = 0
        self._period_s = _REPEAT_S
        self._telling = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def holds(self, epoch: int, *, lease_s: float) -> None:
        """The policy is held under this epoch, for `lease_s` after each sign of life."""
        with self._telling:
            self._period_s = max(_MIN_PERIOD_S, lease_s / 3)
            self._epoch = epoch

    def released(self) -> None:
        """The policy is not held any more: once this returns, no call says that it is."""
        with self._telling:
            self._epoch = 0

    def _run(self) -> None:
        last, last_s = Report(), time.monotonic()
        while not self._done.wait(min(_LOOK_S, self._period_s)):
            report, now_s = descriptors_report() or report_of(self._progress.state), time.monotonic()
            period_s = min(_REPEAT_S, self._period_s) if report.waiting_for else self._period_s
            is_due = now_s - last_s >= period_s and (self._epoch or report.waiting_for)
            if is_due or report.is_news_after(last):
                with self._telling:
                    self._tell(report)
                last, last_s = report, now_s

    def _tell(self, report: Report) -> None:
        request = batch_service_pb2.HoldPolicyRequest(
            **self._names,
            trainer_epoch=self._epoch,
            waiting_for=report.waiting_for,
            detail=report.detail,
            progress=report.progress,
        )
        try:
            self._client.call(self._client.batches.HoldPolicy, request, timeout_s=_TIMEOUT_S, retry=_ONCE)
        except AstraflowError as error:
            # Nothing depends on it but the answer to a rollback; and the epoch changes after Redis lost data.
            log.warning("policy.hold_failed", reason=error.reason, message=error.message)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

"""Units of work: one correlation id per task on nodes and per step in trainers, the same in every daemon's log.

Invariant: inside `unit_of_work` every log line carries the id and every call sends it; the serving daemon
writes it on its own lines (`serve`), so one search over all logs finds everything about a task or a step.
Nodes, trainers and the dataflow server build their ids here and nowhere else.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from astraflow import client
from astraflow_kit import log

_MAX_CHARS = 64


@contextmanager
def unit_of_work(correlation_id: str, **ids: str | int) -> Iterator[None]:
    """Log and call under `correlation_id`, and log `ids`, in this task and the tasks it starts."""
    with client.correlated(correlation_id), log.correlated(correlation_id=correlation_id, **ids):
        yield


def task_correlation(task_id: str) -> str:
    """The id of a task, over all its attempts and members: the task id where that can be a correlation id."""
    return _bounded(task_id)


def step_correlation(policy_id: str, step: int) -> str:
    """The id of a step of a policy, over all epochs that take it."""
    return _bounded(f"{policy_id}/step-{step}")


def _bounded(text: str) -> str:
    """`text` itself when metadata may carry it, else a digest that stands for it."""
    if 0 < len(text) <= _MAX_CHARS and text.isascii() and text.isprintable():
        return text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

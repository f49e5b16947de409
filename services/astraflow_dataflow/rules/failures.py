"""Failures of tasks that are alike, and when a run is stopped because every task fails in the same way.

Pure. Alike are failures with the same reason, exception and place; without a place, with the same text but for its
numbers. Used by leasing, which counts them, by the run loop, which stops the run, and by reporting.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

FROM_THE_RECIPE = frozenset({"workflow_error", "reward_error", "reward_timeout", "environment_failed"})
"""Reasons that lie in what the recipe runs: a run may be stopped for them. Engines and networks recover."""
_MEMBER = re.compile(r"^member \d+: ")
_MORE = re.compile(r" \(and \d+ more members\)$")
_RAISED = re.compile(r"^([\w.]+): .*\((\S+:\d+ in [^()]+)\)$", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_MAX_KIND = 200


@dataclass(frozen=True, kw_only=True)
class TaskFailures:
    """Failures that are alike: how many, how many of them in a row, and the first one."""

    reason: str
    detail: str
    count: int
    in_a_row: int
    """Since a task of the same purpose (training, evaluation) was completed."""
    task_id: str
    node_id: str
    first_ms: int
    last_ms: int


def kind_of(reason: str, detail: str, *, task_id: str) -> str:
    """Return what a failure has in common with those that are alike: one line of at most 200 characters."""
    text = _MORE.sub("", _MEMBER.sub("", detail))
    raised = _RAISED.match(text)
    text = " ".join(raised.groups()) if raised else _NUMBER.sub("#", text.replace(task_id, "*"))
    return " ".join(f"{reason} {text}".split())[:_MAX_KIND]


def why_stopped(failures: Sequence[TaskFailures], *, most_in_a_row: int) -> str:
    """Return why the run must stop, with what to do; empty while it may go on. 0 stops no run."""
    for failure in failures:
        if most_in_a_row and failure.in_a_row >= most_in_a_row and failure.reason in FROM_THE_RECIPE:
            return (
                f"tasks failed alike {failure.in_a_row} times in a row, and none was completed between them "
                f"(dataflow.max_identical_failures is {most_in_a_row}): {failure.reason}: {failure.detail} "
                f"(first: task {failure.task_id} on {failure.node_id}); correct it and start a new run"
            )
    return ""


def some_of(named: Sequence[str]) -> str:
    """Return the first five of what is named, and how many more there are."""
    more = f" (and {len(named) - 5} more)" if len(named) > 5 else ""
    return f"{', '.join(named[:5])}{more}"

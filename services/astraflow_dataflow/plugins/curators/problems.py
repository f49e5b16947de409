"""What curators share: a short key per problem, the solved share of a group, and counts over proposals.

A problem is what `data` of a task has under the named key, so that it is known again under another task id; else the
task. Draws depend on the seed and what they are for only: a call that is repeated decides alike. Pure.
"""

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from astraflow.plugins import Group, PluginState, TaskSpec

PATIENCE = 256
"""Tasks that a curator skips in a row before it takes one anyway, so that a run never stands still for it."""
_TALLY = "tally"


def problem_key(task: TaskSpec, *, field: str) -> str:
    """Return 12 characters that stand for the task's problem; sources may have equal names for theirs."""
    problem = f"{task.source}\n{task.data.get(field, task.task_id)}"
    return urlsafe_b64encode(blake2b(problem.encode(), digest_size=9).digest()).decode()


def concerns(group: Group, *, role: str) -> bool:
    """Whether a curator that observes `role` learns from the group; an empty role is any."""
    return role in ("", group.role)


def solved_share(group: Group, *, above: float) -> float:
    """Return the share of samples with a reward above a bound."""
    return sum(reward > above for reward in group.rewards) / len(group.rewards)


def averaged(before: float, new: float, *, memory: float) -> float:
    """Return the moving average after another value; rounded, for there are as many as problems, and not so much that
    one of a long memory would stand still."""
    return round(memory * before + (1 - memory) * new, 6)


def chance(seed: int, *what: object) -> float:
    """Return a number in [0, 1) that is as good as random, always the same for the same arguments."""
    digest = blake2b(repr((seed, *what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True)
class Tally:
    """Counts that `propose` keeps; asked about the same tasks again, it goes on from before the first time."""

    state: PluginState

    def before(self, tasks: Sequence[TaskSpec]) -> dict[str, Any]:
        """Return the counts before this proposal, to be changed and given to `keep`."""
        kept: Mapping[str, Any] = self.state.get(_TALLY, {"first": None, "after": {}})
        counts: dict[str, Any] = kept["before" if kept["first"] == _first(tasks) else "after"]
        return counts

    def newest(self) -> Mapping[str, Any]:
        """Return the counts after the newest proposal."""
        counts: Mapping[str, Any] = self.state.get(_TALLY, {"after": {}})["after"]
        return counts

    def keep(self, tasks: Sequence[TaskSpec], counts: dict[str, Any]) -> None:
        """Keep the counts after this proposal."""
        self.state[_TALLY] = {"first": _first(tasks), "before": self.before(tasks), "after": counts}


def patient(counts: dict[str, Any], *, wanted: bool) -> bool:
    """Return whether to take a task: one that is wanted, or the first after 256 in a row that were not."""
    counts["skipped"] = 0 if wanted else counts.get("skipped", 0) + 1
    if counts["skipped"] > PATIENCE:
        counts["skipped"] = 0
        return True
    return wanted


def _first(tasks: Sequence[TaskSpec]) -> str:
    return tasks[0].task_id if tasks else ""

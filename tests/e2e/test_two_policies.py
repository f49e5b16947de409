"""Two policies in one run: whatever stops one of them, the other trains on, and afterwards both do.

One run is lived by all tests: each trainer and each engine is frozen and killed in turn. How fast a policy trains
is compared between windows of the same run that alternate, so a busy machine slows both sides of a comparison.
"""

import signal
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from support.audit import read_pushes
from support.development import ROOT, RunFiles, dev, finish, wait_for
from support.ledger_audit import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

POLICIES = ("solver", "verifier")
OTHER = dict(zip(POLICIES, reversed(POLICIES), strict=True))
# More steps than what is sampled ahead would be enough for: 3 versions of the window, and the tasks under way.
WINDOW = 14
SMALL = (
    *("--steps", "100000", "--max-restarts", "1000"),
    *("--set", "policies.verifier.model.warm_start.steps=5"),
    # An untrained verifier earns nothing; its steps count all the same.
    *("--set", "trainer.algorithm.drop_zero_advantage=false"),
    *("--set", "raas.max_concurrent_tasks=8"),
    *("--set", "dataflow.evaluation.every_versions=0"),
)
STEPS_AFTER = 3
FREEZE, KILL = signal.SIGSTOP, signal.SIGKILL


class Victim(NamedTuple):
    """The process of one policy in one daemon."""

    module: str
    policy: str

    @property
    def other(self) -> str:
        """The policy that must not suffer."""
        return OTHER[self.policy]

    @property
    def feeds_the_other(self) -> bool:
        """A verifier without answers has nothing to judge."""
        return self == Victim("engine", "solver")

    def process(self, files: RunFiles) -> psutil.Process:
        """The newest one that lives."""
        found = files.processes(f"-m astraflow_{self.module}")
        own = [item for item in found if self.policy in _words(item.cmdline())]
        return max(own, key=lambda process: process.create_time())


VICTIMS = [Victim(*names) for names in product(("trainer", "engine"), POLICIES)]


@dataclass
class Story:
    """What became of the other policy: seconds that it took for `WINDOW` steps, by victim."""

    files: RunFiles
    undisturbed_s: dict[Victim, float] = field(default_factory=dict)
    disturbed_s: dict[Victim, float] = field(default_factory=dict)
    caught_up: list[tuple[Victim, signal.Signals]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def disturb(self, victim: Victim, how: signal.Signals) -> None:
        """Freeze or kill the victim, let the other policy train meanwhile, and wait until both do again."""
        if not victim.feeds_the_other:
            self.undisturbed_s[victim] = self.undisturbed_s.get(victim, 0.0) + self._window_s(victim.other)
        process = victim.process(self.files)
        process.send_signal(how)
        if victim.feeds_the_other:
            self._await_successor(victim, process)
        else:
            self.disturbed_s[victim] = self.disturbed_s.get(victim, 0.0) + self._window_s(victim.other)
        if how == FREEZE and process.is_running():
            process.send_signal(signal.SIGCONT)
        for policy in POLICIES:
            self.await_steps(policy, STEPS_AFTER)
        self.caught_up.append((victim, how))

    def await_steps(self, policy: str, num_steps: int) -> None:
        """Wait until a policy has taken that many further steps."""
        goal = self.files.steps_taken(policy) + num_steps
        what = f"step {goal} of the {policy}"
        wait_for(lambda: self.files.steps_taken(policy) >= goal, what=what, timeout_s=180, period_s=0.05)

    def _window_s(self, policy: str) -> float:
        started = time.monotonic()
        self.await_steps(policy, WINDOW)
        return time.monotonic() - started

    def _await_successor(self, victim: Victim, process: psutil.Process) -> None:
        """Wait until the node has replaced an engine that died or makes no tokens."""
        wait_for(lambda: not process.is_running(), what=f"the end of {victim}")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run in which every victim was frozen and killed."""
    folder = tmp_path_factory.mktemp("pair")
    lived = Story(RunFiles(folder))
    with dev(folder, *SMALL, recipe=ROOT / "recipes" / "solver-verifier-tiny") as launcher:
        for policy in POLICIES:
            lived.await_steps(policy, STEPS_AFTER)
        for how, victim in product((FREEZE, KILL), VICTIMS):
            lived.disturb(victim, how)
        launcher.send_signal(signal.SIGINT)
        lived.summary = finish(launcher, folder)
    return lived


@pytest.mark.parametrize("victim", [victim for victim in VICTIMS if not victim.feeds_the_other], ids=str)
def test_the_other_policy_keeps_its_rate(story: Story, victim: Victim) -> None:
    assert story.undisturbed_s[victim] / story.disturbed_s[victim] >= 0.8


def test_both_policies_train_again_after_each_disturbance(story: Story) -> None:
    assert story.caught_up == [(victim, how) for how, victim in product((FREEZE, KILL), VICTIMS)]


def test_nothing_is_lost_and_nothing_is_trained_twice(story: Story) -> None:
    account = story.summary["trajectories"]
    assert account["conservation_error"] == 0
    pushed, door = read_pushes(story.files), ("poison", "superseded", "fenced", "late_closed")
    told = sum(len(pushed.kept(evaluations=purpose)) for purpose in (False, True))
    kept = account["ingested"] - sum(account["dropped"].get(reason, 0) for reason in door)
    unanswered = sum(len(pushed.unanswered(evaluations=purpose)) for purpose in (False, True))
    assert told <= kept <= told + unanswered
    for policy in POLICIES:
        ledger = audit(story.files.data_dir / "work" / f"trainer-{policy}" / "ledger.jsonl")
        assert ledger.trained_ids <= pushed.task_of.keys()
        assert ledger.last_step >= story.summary["steps_by_policy"][policy] > 0


def _words(command: list[str]) -> set[str]:
    """Arguments, and the folders of those that are paths."""
    return {part for argument in command for part in Path(argument).parts}

"""Two policies in one run: whatever stops one of them, the other trains on, and afterwards both do.

One run is lived by several tests: trainers and engines are frozen or killed in turn, and so is what replaces them,
until the other policy has taken its steps. How fast that is, is a soak: windows of the same run that alternate are
compared, so a busy machine slows both sides. An engine's window begins when the node has noticed that it is lost.
"""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from support.audit import read_pushes
from support.development import ROOT, RunFiles, dev, finish, wait_for
from support.ledger_audit import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

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
LOOK_S = 0.1
# Stands beside an engine and ends what the engine leaves; only the engine is the victim.
_GUARD = "astraflow_kit.family"
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

    def processes(self, files: RunFiles) -> list[psutil.Process]:
        """Those that live."""
        found = files.processes(f"-m astraflow_{self.module}")
        return [process for process in found if {self.policy} == _words(process) & {self.policy, _GUARD}]


TRAINERS, ENGINES = ([Victim(module, policy) for policy in POLICIES] for module in ("trainer", "engine"))
DISTURBANCES = [*product([FREEZE], TRAINERS), *product([KILL], ENGINES)]
ALL_DISTURBANCES = [*product((FREEZE, KILL), TRAINERS), *product((FREEZE, KILL), ENGINES)]


Disturbance = tuple[signal.Signals, Victim]


@dataclass
class Story:
    """What became of the other policy: seconds that it took for `WINDOW` steps, by victim."""

    files: RunFiles
    is_timed: bool
    undisturbed_s: dict[Victim, float] = field(default_factory=dict)
    disturbed_s: dict[Victim, float] = field(default_factory=dict)
    caught_up: list[tuple[Victim, signal.Signals]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def disturb(self, victim: Victim, how: signal.Signals) -> None:
        """Keep the victim frozen or dead while the other policy trains, and wait until both do again."""
        if self.is_timed and not victim.feeds_the_other:
            self.undisturbed_s[victim] = self.undisturbed_s.get(victim, 0.0) + self._window_s(victim.other)
        num_lost = self._num_lost(victim)
        self._hold_down(victim, how)
        if victim.module == "engine":
            noticed = partial(self._noticed, victim, how, num_lost)
            wait_for(noticed, what=f"the loss of {victim}", timeout_s=240, period_s=LOOK_S)
        if not victim.feeds_the_other:
            self.await_steps(victim.other, 1, meanwhile=lambda: self._hold_down(victim, how))
            took_s = self._window_s(victim.other, meanwhile=lambda: self._hold_down(victim, how))
            self.disturbed_s[victim] = self.disturbed_s.get(victim, 0.0) + took_s
        for process in victim.processes(self.files):
            process.send_signal(signal.SIGCONT)
        for policy in POLICIES:
            self.await_steps(policy, STEPS_AFTER)
        self.caught_up.append((victim, how))

    def await_steps(
        self, policy: str, num_steps: int, *, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until a policy has taken that many further steps."""
        goal = self.files.steps_taken(policy) + num_steps

        def is_there() -> bool:
            meanwhile()
            return self.files.steps_taken(policy) >= goal

        wait_for(is_there, what=f"step {goal} of the {policy}", timeout_s=180, period_s=LOOK_S)

    def _window_s(self, policy: str, *, meanwhile: Callable[[], object] = lambda: None) -> float:
        started = time.monotonic()
        self.await_steps(policy, WINDOW, meanwhile=meanwhile)
        return time.monotonic() - started

    def _hold_down(self, victim: Victim, how: signal.Signals) -> None:
        for process in victim.processes(self.files):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)

    def _noticed(self, victim: Victim, how: signal.Signals, num_lost: int) -> bool:
        self._hold_down(victim, how)
        return self._num_lost(victim) > num_lost

    def _num_lost(self, victim: Victim) -> int:
        """Engines of the policy that the node has given up so far."""
        log = (self.files.data_dir / "logs" / "node-1.log").read_text()
        lines = [line for line in log.splitlines() if '"engine.lost"' in line]
        return sum(f'"policy_id": "{victim.policy}"' in line for line in lines)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run in which every process of a policy was lost once."""
    return _lived(tmp_path_factory.mktemp("pair"), DISTURBANCES, is_timed=False)


@pytest.fixture(scope="module")
def timed_story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A run in which every disturbance happened, each beside a window without one."""
    return _lived(tmp_path_factory.mktemp("timed-pair"), ALL_DISTURBANCES, is_timed=True)


def _lived(folder: Path, disturbances: Sequence[Disturbance], *, is_timed: bool) -> Story:
    lived = Story(RunFiles(folder), is_timed)
    with dev(folder, *SMALL, recipe=ROOT / "recipes" / "solver-verifier-tiny") as launcher:
        for policy in POLICIES:
            lived.await_steps(policy, STEPS_AFTER)
        for how, victim in disturbances:
            lived.disturb(victim, how)
        launcher.send_signal(signal.SIGINT)
        lived.summary = finish(launcher, folder)
    return lived


def test_the_other_policy_trains_on_and_afterwards_both_do(story: Story) -> None:
    assert story.caught_up == [(victim, how) for how, victim in DISTURBANCES]


@pytest.mark.soak
def test_so_they_do_however_each_is_lost(timed_story: Story) -> None:
    assert timed_story.caught_up == [(victim, how) for how, victim in ALL_DISTURBANCES]


@pytest.mark.soak
@pytest.mark.parametrize("victim", [*TRAINERS, Victim("engine", "verifier")], ids="-".join)
def test_the_other_policy_keeps_its_rate(timed_story: Story, victim: Victim) -> None:
    assert timed_story.undisturbed_s[victim] / timed_story.disturbed_s[victim] >= 0.8


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


def _words(process: psutil.Process) -> set[str]:
    """Arguments, and the folders of those that are paths."""
    with suppress(psutil.NoSuchProcess):
        return {part for argument in process.cmdline() for part in Path(argument).parts}
    return set()

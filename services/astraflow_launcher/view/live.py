"""The one live view of a run, and the plain lines that replace it where there is no terminal.

Both only render an `Observation`. On a terminal `LiveView` redraws in place; elsewhere `LineView` writes one
line per step and evaluation to stderr, so that logs of a CI run read well.
"""

from __future__ import annotations

import math
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from astraflow.commands.status import (
    evaluation_details,
    failure_parts,
    failure_text,
    node_parts,
    stop_parts,
    trajectory_parts,
    wait_parts,
)
from astraflow.commands.waits import is_alarm
from astraflow.commands.wording import Printable, enum_text, number_text, sparkline
from astraflow.dataflow.v1 import admin_service_pb2
from astraflow.trainer.v1 import trainer_service_pb2
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint

_LONG_WAIT_S = 5
_DAMAGE_SHOWN_STEPS = 100
_EVALUATION_PERIOD_S = 20
"""Between two lines about an evaluation that goes on."""
_SAID_AGAIN_SHARE = 0.25
"""Of a long phase: how much further it must be for another line."""


class View(Protocol):
    """Shows a run while it goes on."""

    def show(self, observation: Observation, *, doing: str) -> None:
        """Render the newest observation; `doing` is what the launcher itself does."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class QuietView:
    """Shows nothing."""

    def show(self, observation: Observation, *, doing: str) -> None:
        """Ignore the observation."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LineView(QuietView):
    """One line per step, evaluation, kind of failure, long wait, silent process, and change of what is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing = ""
        self._steps = 0
        self._evaluating: dict[tuple[str, str], float] = {}
        self._restarts: dict[str, int] = {}
        self._waits: dict[tuple[str, str, str], admin_service_pb2.Wait] = {}
        self._silent: set[str] = set()
        self._said: set[tuple[str, ...]] = set()

    def show(self, observation: Observation, *, doing: str) -> None:
        """Write what is new since the last call."""
        if observation.server:
            self._write_once(observation, observation.server, "server")
        if doing != self._doing:
            self._doing = doing
            self._write(observation, doing)
        for point in observation.steps_after(max(self._steps, observation.num_earlier_steps)):
            self._write(observation, _step_line(point))
        self._steps = observation.num_steps
        for item in observation.status.evaluations if observation.status else ():
            if item.complete:
                key = ("evaluation", item.policy_id, item.evaluation_id)
                self._write_once(observation, _evaluation_line(item), *key)
        self._show_evaluating(observation)
        self._show_restarts(observation)
        self._show_failures(observation)
        self._show_waits(observation)
        self._show_silent(observation)
        for policy, fault in observation.tracker_faults:
            text = f"{policy} tracker {tracker_text(fault)}; training goes on"
            self._write_once(observation, text, "tracker", policy, fault.tracker)

    def _show_evaluating(self, observation: Observation) -> None:
        """Say of an evaluation that takes long how far it is."""
        now = {(item.policy_id, item.evaluation_id): item for item in observation.evaluating}
        self._evaluating = {
            key: self._evaluating.get(key, observation.seconds + _EVALUATION_PERIOD_S) for key in now
        }
        for key, item in now.items():
            if observation.seconds >= self._evaluating[key]:
                self._evaluating[key] = observation.seconds + _EVALUATION_PERIOD_S
                self._write(observation, _evaluating_text(item))

    def _show_restarts(self, observation: Observation) -> None:
        """Say of each child that was started again how it had ended."""
        for name, count in observation.restarts.items():
            if count > self._restarts.get(name, 0):
                self._write(observation, _restart_text(observation, name))
        self._restarts = dict(observation.restarts)

    def _show_failures(self, observation: Observation) -> None:
        """Say each kind of failure when it first happens, and why the server stopped the run."""
        for item in observation.status.failures if observation.status else ():
            self._write_once(observation, f"FAILED {failure_text(item)}", "failure", item.reason, item.detail)
        if observation.stopped_for:
            self._write_once(observation, f"STOPPED {observation.stopped_for}", "stop")

    def _show_waits(self, observation: Observation) -> None:
        """Say what is wrong at once, with what would end it, and its end; and once what else has been waited for longer
        than a moment, a long phase again as it goes on.
        """
        now = {
            (wait.stage, wait.policy_id, wait.reason): wait
            for wait in observation.waits
            if is_alarm(wait) or wait.waited_duration.seconds >= _LONG_WAIT_S
        }
        for key, wait in now.items():
            said = self._waits.get(key)
            if said is not None and wait.progress < said.progress + _SAID_AGAIN_SHARE:
                now[key] = said
                continue
            released = f"; next: {wait.released_by}" if is_alarm(wait) else ""
            self._write(observation, f"{_wait_title(wait)} — {wait.detail}{released}")
        for key in self._waits.keys() - now.keys():
            if is_alarm(self._waits[key]):
                self._write(observation, f"{_wait_title(self._waits[key])}: over")
        self._waits = now

    def _show_silent(self, observation: Observation) -> None:
        """Say which process stands still, and its end: it answers, or another one is in its place."""
        now = set(observation.silent)
        for name in sorted(now - self._silent):
            self._write(observation, f"{name} does not answer: {observation.silent[name]}")
        for name in sorted(self._silent - now):
            self._write(observation, f"{name} does not answer: over")
        self._silent = now

    def _write_once(self, observation: Observation, text: str, *key: str) -> None:
        """Write it unless something of this key was written before."""
        if key not in self._said:
            self._said.add(key)
            self._write(observation, text)

    def _write(self, observation: Observation, text: str) -> None:
        self._console.print(
            f"{observation.seconds:7.1f}s  {text}", highlight=False, markup=False, soft_wrap=True
        )


class LiveView:
    """Redraws panels in place on a terminal."""

    def __init__(self, console: Console, *, title: str) -> None:
        self._title = title
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def show(self, observation: Observation, *, doing: str) -> None:
        """Redraw."""
        self._live.update(Printable(render(observation, title=self._title, doing=doing)))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def render(observation: Observation, *, title: str, doing: str) -> RenderableType:
    """Return the whole view as something rich can print."""
    parts: list[RenderableType] = [Text(f"{doing}  ·  {observation.seconds:.0f} s", style="bold")]
    parts += [
        _policy_panel(observation, policy)
        for policy in observation.policies() or sorted(observation.trainers)
    ]
    parts += _run_parts(observation)
    parts += [Text(_evaluating_text(item)) for item in observation.evaluating]
    parts += [
        Text(_restart_text(observation, name), style="yellow")
        for name, count in observation.restarts.items()
        if count
    ]
    for policy, fault in observation.tracker_faults:
        parts.append(Text(f"{policy} tracker {tracker_text(fault)}", style="yellow"))
    for name, why in sorted(observation.unreachable.items()):
        parts.append(Text(f"{name} does not answer: {why}", style="dim"))
    parts.append(Text(observation.server, style="dim"))
    return Panel(Group(*parts), title=f"astraflow · {title}", title_align="left", border_style="cyan")


def tracker_text(fault: trainer_service_pb2.TrackerFault) -> str:
    """Say which tracker lacks how many steps, and why."""
    return f"{fault.tracker} lacks {fault.steps_missed} steps: {fault.error}"


def _policy_panel(observation: Observation, policy: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*_trainer_cells(observation, policy))
    rewards = [point.metrics.get("reward_mean", math.nan) for point in observation.steps_of(policy)]
    heldout = [item.mean_reward for item in observation.evaluations(policy)]
    for name, values, style in (("train reward", rewards, "green"), ("held-out", heldout, "yellow")):
        grid.add_row(
            name, number_text(values[-1] if values else math.nan), Text(sparkline(values), style=style)
        )
    grid.add_row("weights", *_weight_cells(observation, policy))
    for damage in filter(None, map(_damage, observation.steps_of(policy)[-_DAMAGE_SHOWN_STEPS:])):
        grid.add_row("checkpoints", "", damage.strip())
    return Panel(grid, title=f"policy {policy}", title_align="left", border_style="dim")


def _trainer_cells(observation: Observation, policy: str) -> tuple[str, str, str]:
    trainer = observation.trainers.get(policy)
    if trainer is None:
        return ("trainer", "–", observation.unreachable.get(policy, "starting"))
    phase = enum_text(trainer_service_pb2.Phase.DESCRIPTOR, trainer.phase)
    progress = f" {trainer.progress:.0%}" if trainer.phase == trainer_service_pb2.PHASE_STARTING else ""
    waits = f"waits for {trainer.waiting_for}" if trainer.waiting_for else ""
    return (
        "trainer",
        f"step {trainer.step}{_skipped_text(observation, policy)}",
        f"{phase}{progress} {waits} · waited {trainer.wait_fraction:.0%}",
    )


def _skipped_text(observation: Observation, policy: str) -> str:
    skipped = observation.totals(policy).num_skipped
    return f" ({skipped} skipped)" if skipped else ""


def _weight_cells(observation: Observation, policy: str) -> tuple[str, str]:
    versions = observation.versions.get(policy, [])
    if not versions:
        return ("–", "no version yet")
    last = versions[-1]
    size = (
        f"delta {last.delta_bytes / 1e3:.0f} kB, density {last.density:.1%}"
        if last.delta_bytes
        else "snapshot"
    )
    point = observation.last_step(policy)
    stale = point.metrics.get("staleness_mean", 0.0) if point else 0.0
    return (f"version {last.version}", f"{size} · staleness {stale:.1f}")


def _run_parts(observation: Observation) -> list[RenderableType]:
    """What `astraflow status` shows of trajectories, nodes and waits."""
    status = admin_service_pb2.StatusResponse()
    if observation.status is not None:
        status.CopyFrom(observation.status)
    elif observation.server_wait is None:
        return [Text("dataflow: starting", style="dim")]
    del status.waits[:]
    status.waits.extend(observation.waits)
    failed = [
        *stop_parts(status.stopped_for),
        *failure_parts(status.failures, dead_letters=status.dead_letters),
    ]
    return [*failed, *trajectory_parts(status), *node_parts(status), *wait_parts(status)]


def _wait_title(wait: admin_service_pb2.Wait) -> str:
    return f"{wait.policy_id} {wait.stage} waits: {wait.reason}".strip()


def _step_line(point: StepPoint) -> str:
    metrics = point.metrics
    skipped = f"  skipped: {point.skipped_for}" if point.skipped_for else ""
    return (
        f"{point.policy} step {point.step:4d}  reward {metrics.get('reward_mean', math.nan):.3f}  "
        f"staleness {metrics.get('staleness_mean', 0.0):.1f}  waited {metrics.get('wait_s', 0.0):.2f} s  "
        f"trained {metrics.get('train_s', 0.0):.2f} s{skipped}{_damage(point)}{_left_out(point)}"
    )


def _damage(point: StepPoint) -> str:
    num_damaged = round(point.metrics.get("damaged_checkpoints", 0))
    if not num_damaged:
        return ""
    return f"  DAMAGED: {num_damaged} newer checkpoint(s) were put aside, see checkpoint.damaged in the trainer's log"


def _left_out(point: StepPoint) -> str:
    number = round(point.metrics.get("num_left_out_trajectories", 0))
    batches = round(point.metrics.get("num_quarantined_batches", 0))
    said = "trajectories that cannot be trained on, see batch.group_left_out in the trainer's log"
    words = f"  LEFT OUT: {number} {said}" if number else ""
    if batches:
        words += f"  QUARANTINED: {batches} batches that are not what they say, see batch.quarantined there"
    return words


def _evaluating_text(item: admin_service_pb2.Evaluation) -> str:
    return (
        f"{item.policy_id} evaluates version {item.version}: {item.num_samples} of {item.num_planned} samples"
    )


def _restart_text(observation: Observation, name: str) -> str:
    return f"RESTARTED {name} ({observation.restarts[name]}), it ended with {observation.ends.get(name, 'no word')}"


def _evaluation_line(item: admin_service_pb2.Evaluation) -> str:
    kind = "final evaluation" if item.final else "evaluation"
    result = f"held-out {item.mean_reward:.3f} ({item.num_samples} samples)"
    if not item.num_samples:
        result = "closed before a sample was graded"
    details = evaluation_details(item)
    return f"{item.policy_id} {kind} of version {item.version}: {result}{f'; {details}' if details else ''}"

"""The end of a development run as numbers: the one JSON object of `--json`, and the table for people.

Every figure is computed here from an `Observation`, so the live view, the file and the terminal cannot
disagree.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from astraflow.commands import wording
from astraflow.commands.status import PLACES
from astraflow.dataflow.v1 import admin_service_pb2
from astraflow_launcher.view.observation import Observation

_MAX_FAILURES = 3
_LAST_OF_POLICY = ("completion_tokens_mean", "truncated_fraction", "entropy", "mismatch_kl")


@dataclass(frozen=True)
class Staleness:
    """Versions between sampling and training."""

    p50: float
    p99: float
    max: int


@dataclass(frozen=True)
class NodeSummary:
    """One node's share."""

    id: str
    tokens: int
    trajectories: int
    restarts: int


@dataclass(frozen=True)
class PolicySummary:
    """One policy that is trained. Rewards are null where there was no point."""

    steps: int
    version: int
    reward_first: float | None
    reward_last: float | None
    heldout_first: float | None
    heldout_last: float | None
    heldout_n: int
    heldout_roles: dict[str, float]
    """Of the last evaluation, by role."""
    trainer_wait_fraction: float
    completion_tokens_mean: float | None
    """This and the next three are those of the last step that was not skipped."""
    truncated_fraction: float | None
    entropy: float | None
    mismatch_kl: float | None


@dataclass(frozen=True)
class Summary:
    """The final object of `astraflow dev --json`. Rewards are means over policies; null where there was no
    point.
    """

    steps: int
    steps_by_policy: dict[str, int]
    policies: dict[str, PolicySummary]
    heldout_metrics: dict[str, float]
    """Episode metrics of the last evaluation."""
    heldout_scores: list[dict[str, Any]]
    """Of the last evaluation, of each policy and source: the contract's Scores."""
    heldout_samples: dict[str, int] | None
    """Of the last evaluation: `planned`, `results` of the policy that has most, and `per_task`; null without one."""
    reward_first: float | None
    reward_last: float | None
    heldout_first: float | None
    heldout_last: float | None
    heldout_n: int
    wall_s: float
    first_reward_s: float | None
    trajectories: dict[str, Any]
    """Where every ingested trajectory ended: the fields of the contract's TrajectoryAccount."""
    conservation_error: int
    staleness: Staleness
    trainer_wait_fraction: float
    versions: int
    snapshot_bytes: int
    delta_bytes_mean: float
    density_mean: float
    snapshots_fetched: int
    steps_skipped: int
    learned_nothing: str | None
    """One sentence when no step changed a weight."""
    failures: list[dict[str, Any]]
    """Kinds of failures of tasks: the contract's TaskFailures."""
    dead_letters: int
    stopped_for: str | None
    """Why the server stopped the run, and what to do."""
    tracker_faults: list[dict[str, Any]]
    """Experiment trackers that lack steps: the contract's TrackerFaults."""
    autoscaling: dict[str, Any] | None
    """The contract's Autoscaling; null where the number of nodes was not the run's own affair."""
    nodes: tuple[NodeSummary, ...]
    restarts: dict[str, int]
    peak_pss_bytes: int
    goal_met: bool | None
    data_dir: str


def summarize(
    observation: Observation, *, wall_s: float, peak_pss_bytes: int, goal_met: bool | None, data_dir: str
) -> Summary:
    """Compute the summary from what was observed."""
    status = observation.status or admin_service_pb2.StatusResponse()
    policies = observation.policies()
    evaluations = [observation.evaluations(policy) for policy in policies]
    last = max((items[-1] for items in evaluations if items), key=_completed, default=None)
    totals = [observation.totals(policy) for policy in observation.versions]
    num_deltas = max(1, sum(item.num_deltas for item in totals))
    return Summary(
        steps=min((item.last_finished_step for item in observation.trained), default=0),
        steps_by_policy={item.policy_id: item.last_finished_step for item in observation.trained},
        policies={item.policy_id: _policy(observation, item) for item in observation.trained},
        heldout_metrics=dict(sorted(last.metrics.items())) if last is not None else {},
        heldout_scores=_scores(observation),
        heldout_samples=_samples(observation),
        reward_first=_mean(_step_reward(observation, policy, first=True) for policy in policies),
        reward_last=_mean(_step_reward(observation, policy, first=False) for policy in policies),
        heldout_first=_mean(items[0].mean_reward if items else None for items in evaluations),
        heldout_last=_mean(items[-1].mean_reward if items else None for items in evaluations),
        heldout_n=min((items[-1].num_samples for items in evaluations if items), default=0),
        wall_s=round(wall_s, 2),
        first_reward_s=observation.first_reward_s and round(observation.first_reward_s, 2),
        trajectories=wording.as_json(status.trajectories),
        conservation_error=status.trajectories.conservation_error,
        staleness=_staleness(status),
        trainer_wait_fraction=_mean(item.wait_fraction for item in observation.trainers.values()) or 0.0,
        versions=sum(item.num_versions for item in totals),
        snapshot_bytes=sum(item.snapshot_bytes for item in totals),
        delta_bytes_mean=sum(item.delta_bytes for item in totals) / num_deltas,
        density_mean=sum(item.densities for item in totals) / num_deltas,
        snapshots_fetched=sum(
            policy.snapshots_fetched for node in observation.nodes.values() for policy in node.policies
        ),
        steps_skipped=observation.num_skipped,
        learned_nothing=observation.learned_nothing or None,
        failures=[wording.as_json(item) for item in status.failures],
        dead_letters=status.dead_letters,
        stopped_for=status.stopped_for or None,
        tracker_faults=[wording.as_json(fault) for _, fault in observation.tracker_faults],
        autoscaling=wording.as_json(status.autoscaling) if status.HasField("autoscaling") else None,
        nodes=tuple(_node(observation, node) for node in status.nodes),
        restarts=dict(observation.restarts),
        peak_pss_bytes=peak_pss_bytes,
        goal_met=goal_met,
        data_dir=data_dir,
    )


def _scores(observation: Observation) -> list[dict[str, Any]]:
    last = observation.last_evaluation
    return [wording.as_json(score) for score in last.scores] if last is not None else []


def _samples(observation: Observation) -> dict[str, int] | None:
    items = observation.last_evaluation.evaluations if observation.last_evaluation is not None else ()
    if not items:
        return None
    results = max(item.num_samples for item in items)
    return {"planned": items[0].num_planned, "results": results, "per_task": items[0].samples_per_task}


def _completed(item: admin_service_pb2.Evaluation) -> int:
    return item.complete_time.ToNanoseconds()


def _policy(observation: Observation, status: admin_service_pb2.PolicyStatus) -> PolicySummary:
    policy_id = status.policy_id
    evaluations = observation.evaluations(policy_id)
    trainer = observation.trainers.get(policy_id)
    taken = observation.totals(policy_id).last_taken
    last = taken.metrics if taken is not None else {}
    return PolicySummary(
        steps=status.last_finished_step,
        version=status.version.version,
        reward_first=_step_reward(observation, policy_id, first=True),
        reward_last=_step_reward(observation, policy_id, first=False),
        heldout_first=_mean([evaluations[0].mean_reward]) if evaluations else None,
        heldout_last=_mean([evaluations[-1].mean_reward]) if evaluations else None,
        heldout_n=evaluations[-1].num_samples if evaluations else 0,
        heldout_roles={role.role: role.mean_reward for role in evaluations[-1].roles} if evaluations else {},
        trainer_wait_fraction=trainer.wait_fraction if trainer is not None else 0.0,
        **{name: last.get(name) for name in _LAST_OF_POLICY},
    )


def as_table(summary: Summary) -> Table:
    """Return the summary as a table for people."""
    table = Table(title="summary", show_header=False, title_style="bold", title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def _rows(summary: Summary) -> list[tuple[str, str]]:
    account, staleness = summary.trajectories, summary.staleness
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(account["dropped"].items())) or "none"
    share = summary.delta_bytes_mean / summary.snapshot_bytes if summary.snapshot_bytes else 0.0
    delta_kb, density = summary.delta_bytes_mean / 1e3, summary.density_mean
    nodes = [f"{node.id}: {node.tokens} tokens, {node.trajectories} trajectories" for node in summary.nodes]
    return [
        *_troubles(summary),
        ("steps", f"{_steps(summary)} in {summary.wall_s:.0f} s"),
        ("steps skipped", str(summary.steps_skipped)),
        ("first reward", f"after {_text(summary.first_reward_s)} s"),
        *_rewards(summary),
        *_completions(summary),
        ("trajectories", _account(account)),
        ("dropped", dropped),
        ("conservation error", str(summary.conservation_error)),
        ("staleness", f"p50 {staleness.p50:.0f}, p99 {staleness.p99:.0f}, max {staleness.max} versions"),
        ("trainer waited", f"{_waited(summary)} of the time"),
        ("weight versions", f"{summary.versions}; {summary.snapshots_fetched} snapshots fetched"),
        ("delta", f"{delta_kb:.0f} kB on average, {share:.0%} of a snapshot, density {density:.1%}"),
        ("nodes", "; ".join(nodes)),
        ("memory", f"{summary.peak_pss_bytes / 2**30:.2f} GiB at the peak, all processes"),
        ("folder", summary.data_dir),
    ]


def _troubles(summary: Summary) -> list[tuple[str, str]]:
    """What went wrong, before all figures; nothing when nothing did."""
    rows = [("stopped", summary.stopped_for)] if summary.stopped_for else []
    rows += [("learned", summary.learned_nothing)] if summary.learned_nothing else []
    for item in summary.failures[:_MAX_FAILURES]:
        first = f", first {item['task_id']}" if item["task_id"] else ""
        rows.append(("failed", f"{item['count']} times{first}: {item['reason']}: {item['detail']}"))
    for fault in summary.tracker_faults:
        rows.append((fault["tracker"], f"lacks {fault['steps_missed']} steps: {fault['error']}"))
    if summary.dead_letters:
        rows.append(("dead letters", f"{summary.dead_letters} tasks were given up"))
    return rows


def _account(account: dict[str, Any]) -> str:
    """Where all that arrived has ended; the terms add up to it."""
    terms = [f"{account[name]} {word}" for name, word in PLACES if account[name]]
    num_dropped = sum(account["dropped"].values())
    terms += [f"{num_dropped} dropped"] if num_dropped else []
    return f"{account['ingested']} arrived = {' + '.join(terms) or '0'}"


def _steps(summary: Summary) -> str:
    if len(set(summary.steps_by_policy.values())) < 2:
        return str(summary.steps)
    return ", ".join(f"{policy_id} {steps}" for policy_id, steps in summary.steps_by_policy.items())


def _rewards(summary: Summary) -> list[tuple[str, str]]:
    """One row of each kind for every policy, and the metrics of the last evaluation."""
    rows, several = [], len(summary.policies) > 1
    for policy_id, item in summary.policies.items():
        prefix = f"{policy_id}: " if several else ""
        heldout = f"{_text(item.heldout_first)} → {_text(item.heldout_last)} ({item.heldout_n} samples)"
        if len(item.heldout_roles) > 1:
            heldout += "; " + ", ".join(f"{role} {_text(mean)}" for role, mean in item.heldout_roles.items())
        rows.append((f"{prefix}held-out reward", heldout))
        rows.append((f"{prefix}training reward", f"{_text(item.reward_first)} → {_text(item.reward_last)}"))
    if several and summary.heldout_metrics:
        metrics = ", ".join(f"{name} {_text(mean)}" for name, mean in summary.heldout_metrics.items())
        rows.append(("held-out metrics", metrics))
    return rows


def _completions(summary: Summary) -> list[tuple[str, str]]:
    """What the last step was trained on, and how far engine and trainer were apart."""
    rows, several = [], len(summary.policies) > 1
    for policy_id, item in summary.policies.items():
        if item.completion_tokens_mean is None:
            continue
        length = f"{item.completion_tokens_mean:.1f} tokens, {item.truncated_fraction or 0.0:.1%} truncated"
        nats = f"entropy {_text(item.entropy)}, KL of engine and trainer {_text(item.mismatch_kl)} nats"
        rows.append((f"{policy_id}: last step" if several else "last step", f"{length}; {nats}"))
    return rows


def _waited(summary: Summary) -> str:
    if len(summary.policies) < 2:
        return f"{summary.trainer_wait_fraction:.0%}"
    return ", ".join(f"{name} {item.trainer_wait_fraction:.0%}" for name, item in summary.policies.items())


def _step_reward(observation: Observation, policy: str, *, first: bool) -> float | None:
    point = observation.totals(policy).first_step if first else observation.last_step(policy)
    return point.metrics.get("reward_mean") if point is not None else None


def _staleness(status: admin_service_pb2.StatusResponse) -> Staleness:
    worst = [policy.staleness for policy in status.policies]
    return Staleness(
        p50=max((item.p50 for item in worst), default=0.0),
        p99=max((item.p99 for item in worst), default=0.0),
        max=max((item.max for item in worst), default=0),
    )


def _node(observation: Observation, node: admin_service_pb2.NodeStatus) -> NodeSummary:
    restarts = max(node.restarts, observation.restarts.get(node.node_id, 0))
    return NodeSummary(node.node_id, node.tokens, node.trajectories, restarts)


def _mean(values: object) -> float | None:
    known = [float(value) for value in values if value is not None and not math.isnan(value)]  # type: ignore[attr-defined]
    return fmean(known) if known else None


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"

"""Every metric AstraFlow exports: name, type, labels and meaning.

One table, so that dashboards, docs and alerts can be checked against it. Add an entry here before using
it; the `Metrics` object refuses names and labels that are not declared. Labels must be bounded: reasons,
policies, pools and rpc names are fine, ids never.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Metric:
    """One entry. `buckets` are the upper bounds of a histogram, in the unit its name ends with."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


_ENTRIES = (
    # kit
    Metric("astraflow_rpcs_total", Kind.COUNTER, "Finished rpcs by final status code.", ("rpc", "code")),
    Metric("astraflow_rpc_seconds", Kind.HISTOGRAM, "Duration of rpcs; streams from open to end.", ("rpc",)),
    Metric("astraflow_rpcs_active", Kind.GAUGE, "Rpcs in progress, streams included.", ("rpc",)),
    Metric(
        "astraflow_rpcs_refused_total",
        Kind.COUNTER,
        "Refused rpcs by error, and why by token.",
        ("reason", "why"),
    ),
    Metric("astraflow_tls_expiry_timestamp_seconds", Kind.GAUGE, "When the server's certificate ends."),
    # dataflow
    Metric("astraflow_dataflow_pushes_total", Kind.COUNTER, "Pushed episodes by outcome.", ("outcome",)),
    Metric(
        "astraflow_dataflow_push_seconds", Kind.HISTOGRAM, "From a push's arrival to its committed answer."
    ),
    Metric("astraflow_dataflow_leases_total", Kind.COUNTER, "Leases given, by purpose.", ("purpose",)),
    Metric("astraflow_dataflow_leases_expired_total", Kind.COUNTER, "Leases that were not renewed in time."),
    Metric(
        "astraflow_dataflow_groups_total", Kind.COUNTER, "Settled groups by verdict.", ("policy", "verdict")
    ),
    Metric("astraflow_dataflow_steps_total", Kind.COUNTER, "Stages of steps recorded.", ("policy", "stage")),
    Metric("astraflow_dataflow_version", Kind.GAUGE, "Newest announced version.", ("policy",)),
    Metric(
        "astraflow_dataflow_ready_groups", Kind.GAUGE, "Complete groups that no batch has taken.", ("policy",)
    ),
    Metric(
        "astraflow_dataflow_outstanding_groups", Kind.GAUGE, "Groups leased and not complete.", ("policy",)
    ),
    Metric("astraflow_dataflow_credit_groups", Kind.GAUGE, "Groups that may be leased now.", ("policy",)),
    Metric("astraflow_dataflow_acceptance", Kind.GAUGE, "Share of groups that survive filters.", ("policy",)),
    Metric("astraflow_dataflow_trajectories", Kind.GAUGE, "Trajectories of a run by place.", ("place",)),
    Metric(
        "astraflow_dataflow_conservation_error",
        Kind.GAUGE,
        "Trajectories unaccounted for; not 0 is a defect.",
    ),
    Metric("astraflow_dataflow_weight_faults", Kind.GAUGE, "Faulty weight versions that nodes report."),
    Metric("astraflow_dataflow_plugin_faults", Kind.GAUGE, "Faults of a plug-in so far.", ("kind", "plugin")),
    Metric("astraflow_dataflow_nodes_connected", Kind.GAUGE, "Nodes with an open working session."),
    # raas
    Metric("astraflow_raas_leases_total", Kind.COUNTER, "Leases taken, by task's purpose.", ("purpose",)),
    Metric("astraflow_raas_leases_ended_total", Kind.COUNTER, "Leases ended, by outcome.", ("outcome",)),
    Metric("astraflow_raas_episodes_total", Kind.COUNTER, "Episodes run, by outcome.", ("outcome",)),
    Metric("astraflow_raas_episode_seconds", Kind.HISTOGRAM, "Duration of episodes, waiting included."),
    Metric("astraflow_raas_pushes_total", Kind.COUNTER, "Pushes by the server's outcome.", ("outcome",)),
    Metric("astraflow_raas_unacked_episodes", Kind.GAUGE, "Episodes finished but not acknowledged."),
    Metric("astraflow_raas_start_seconds", Kind.GAUGE, "Process start to each stage of joining.", ("stage",)),
    Metric("astraflow_raas_spool_episodes", Kind.GAUGE, "Episodes kept, not yet safe ones included."),
    Metric("astraflow_raas_spool_faults_total", Kind.COUNTER, "Episodes that the disk did not take."),
    Metric("astraflow_raas_tokens", Kind.GAUGE, "Tokens sampled since the node started.", ("policy",)),
    Metric("astraflow_raas_serving_version", Kind.GAUGE, "Weight version the engine serves.", ("policy",)),
    Metric("astraflow_raas_fetch_seconds", Kind.HISTOGRAM, "Time to fetch a version.", ("policy",)),
    Metric("astraflow_raas_apply_seconds", Kind.HISTOGRAM, "Time to apply a version.", ("policy",)),
    Metric(
        "astraflow_raas_swap_seconds", Kind.HISTOGRAM, "Time to load, swap and prove a version.", ("policy",)
    ),
    Metric(
        "astraflow_raas_version_failures_total", Kind.COUNTER, "Failed activations.", ("policy", "reason")
    ),
    Metric(
        "astraflow_raas_weight_mismatches_total",
        Kind.COUNTER,
        "Engines that answered otherwise than their weights do.",
        ("policy",),
    ),
    Metric(
        "astraflow_raas_external_calls_total",
        Kind.COUNTER,
        "Attempts of calls to external endpoints.",
        ("policy", "outcome"),
    ),
    Metric(
        "astraflow_raas_external_tokens_total", Kind.COUNTER, "Tokens that they bill.", ("policy", "kind")
    ),
    Metric("astraflow_raas_agent_episodes_total", Kind.COUNTER, "Episodes of agents.", ("outcome",)),
    Metric("astraflow_raas_agent_calls_total", Kind.COUNTER, "Requests of agents.", ("role", "outcome")),
    Metric("astraflow_raas_max_episodes", Kind.GAUGE, "Episodes that the node runs at once at most."),
    Metric(
        "astraflow_raas_engine_sequences",
        Kind.GAUGE,
        "Sequences of its engines, by state.",
        ("policy", "state"),
    ),
    Metric("astraflow_raas_engine_tokens_per_second", Kind.GAUGE, "Tokens they sample.", ("policy",)),
    Metric("astraflow_raas_engine_kv_usage", Kind.GAUGE, "Share of their key-value memory.", ("policy",)),
    Metric("astraflow_raas_engine_losses_total", Kind.COUNTER, "Engines that died or hung.", ("policy",)),
    # environment service
    Metric("astraflow_environment_workers", Kind.GAUGE, "Worker processes that are loaded."),
    Metric("astraflow_environment_open_sessions", Kind.GAUGE, "Sessions that hold a place in a worker."),
    Metric("astraflow_environment_sessions_total", Kind.COUNTER, "Sessions by how they ended.", ("end",)),
    Metric(
        "astraflow_environment_call_seconds",
        Kind.HISTOGRAM,
        "Calls of an environment, its own time.",
        ("call",),
    ),
    # trainer
    Metric("astraflow_trainer_damaged_checkpoints_total", Kind.COUNTER, "Checkpoints put aside at a start."),
    Metric("astraflow_trainer_step", Kind.GAUGE, "Last finished step.", ("policy",)),
    Metric("astraflow_trainer_reward", Kind.GAUGE, "Mean reward of the last step's batch.", ("policy",)),
    Metric(
        "astraflow_trainer_completion_tokens",
        Kind.GAUGE,
        "Tokens generated a trajectory, in the last step's batch: mean, p50, p90, max.",
        ("policy", "stat"),
    ),
    Metric("astraflow_trainer_truncated", Kind.GAUGE, "Share of them that a limit cut off.", ("policy",)),
    Metric("astraflow_trainer_entropy_nats", Kind.GAUGE, "Of the next token, in the last step.", ("policy",)),
    Metric("astraflow_trainer_mismatch_kl_nats", Kind.GAUGE, "KL(engine, trainer) per token.", ("policy",)),
    Metric(
        "astraflow_trainer_tracker_missed_steps_total",
        Kind.COUNTER,
        "Steps that an experiment tracker does not have.",
        ("tracker",),
    ),
    Metric("astraflow_trainer_publish_blocked_seconds", Kind.HISTOGRAM, "Training held, a step.", ("cause",)),
    # weights
    # engine
    Metric("astraflow_engine_requests", Kind.GAUGE, "Requests in the engine by state.", ("state",)),
    Metric("astraflow_engine_tokens", Kind.GAUGE, "Tokens since the engine started, by kind.", ("kind",)),
    Metric("astraflow_engine_tokens_per_second", Kind.GAUGE, "Generated tokens per second, last window."),
    Metric("astraflow_engine_weight_swaps", Kind.GAUGE, "Weight swaps since the engine started."),
)

SCHEMA: dict[str, Metric] = {entry.name: entry for entry in _ENTRIES}

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

TOKENS = tuple(64.0 * 2**power for power in range(12))


@dataclass(frozen=True)
class Metric:
    """One entry. `buckets` are the upper bounds of a histogram, in the unit its name ends with."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


def _counter(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, about, labels)


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, about, labels)


def _histogram(name: str, about: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(name, Kind.HISTOGRAM, about, labels, buckets)


_ENTRIES = (
    # kit
    _counter("astraflow_rpcs_total", "Finished rpcs by final status code.", "rpc", "code"),
    _histogram("astraflow_rpc_seconds", "Duration of rpcs; streams from open to end.", "rpc"),
    _gauge("astraflow_rpcs_active", "Rpcs in progress, streams included.", "rpc"),
    _counter("astraflow_rpcs_refused_total", "Refused rpcs by error, and why by token.", "reason", "why"),
    _gauge("astraflow_tls_expiry_timestamp_seconds", "When the server's certificate ends."),
    _gauge(
        "astraflow_tls_client_expiry_timestamp_seconds",
        "When the certificate ends that a node or a trainer shows to servers; else 0.",
    ),
    _gauge(
        "astraflow_token_expiry_timestamp_seconds",
        "When the first token in use that ends soon ends, or ended within the hour; else 0.",
    ),
    # dataflow
    _counter("astraflow_dataflow_pushes_total", "Pushed episodes by outcome.", "outcome"),
    _counter(
        "astraflow_dataflow_refused_episodes_total",
        "Pushed episodes that were not the session's to push.",
        "reason",
    ),
    _counter("astraflow_dataflow_refused_leases_total", "Leases that a node renewed and was not given."),
    _counter("astraflow_dataflow_hedges_total", "Pushed episodes of second copies by outcome.", "outcome"),
    _histogram("astraflow_dataflow_push_seconds", "From a push's arrival to its committed answer."),
    _counter("astraflow_dataflow_leases_total", "Leases given, by purpose.", "purpose"),
    _counter("astraflow_dataflow_leases_expired_total", "Leases that were not renewed in time."),
    _counter("astraflow_dataflow_groups_total", "Settled groups by verdict.", "policy", "verdict"),
    _histogram(
        "astraflow_dataflow_response_tokens",
        "Trainable tokens of settled trajectories, by verdict, of tasks that were complete or closed early.",
        *("policy", "verdict", "closed"),
        buckets=TOKENS,
    ),
    _counter("astraflow_dataflow_archived_total", "Trajectories written to archives."),
    _gauge("astraflow_dataflow_archive_given_up", "Trajectories that never got into an archive.", "run"),
    _counter("astraflow_dataflow_steps_total", "Stages of steps recorded.", "policy", "stage"),
    _gauge("astraflow_dataflow_version", "Newest announced version.", "run", "policy"),
    _gauge("astraflow_dataflow_ready_groups", "Complete groups that no batch has taken.", "run", "policy"),
    _gauge("astraflow_dataflow_outstanding_groups", "Groups leased and not complete.", "run", "policy"),
    _gauge("astraflow_dataflow_credit_groups", "Groups that may be leased now.", "run", "policy"),
    _gauge("astraflow_dataflow_acceptance", "Share of groups that survive filters.", "run", "policy"),
    _gauge("astraflow_dataflow_trajectories", "Trajectories of a run by place.", "run", "place"),
    _gauge("astraflow_dataflow_conservation_error", "Trajectories unaccounted for: a defect.", "run"),
    _gauge("astraflow_dataflow_weight_faults", "Weight versions with wrong bytes that nodes report.", "run"),
    _gauge("astraflow_dataflow_plugin_faults", "Faults of a plug-in so far.", "run", "kind", "plugin"),
    _gauge(
        "astraflow_dataflow_shadow_decisions", "Tasks or groups a shadow decided on.", "run", "kind", "plugin"
    ),
    _gauge("astraflow_dataflow_shadow_differences", "Those decided otherwise.", "run", "kind", "plugin"),
    _gauge(
        "astraflow_dataflow_wait_seconds", "What waits now, since when.", "run", "policy", "stage", "reason"
    ),
    _gauge("astraflow_dataflow_balance", "1 for who waits for whom.", "run", "policy", "verdict"),
    _gauge("astraflow_dataflow_redis_wait_seconds", "What Redis lacks now, since when.", "reason"),
    _gauge("astraflow_dataflow_staleness_versions", "Of groups: p50, p99, max.", "run", "policy", "stat"),
    _gauge("astraflow_dataflow_version_bytes", "Size of the newest version.", "run", "policy", "kind"),
    _gauge("astraflow_dataflow_version_density", "Share of weights it changed.", "run", "policy"),
    _gauge("astraflow_dataflow_version_lag", "Versions that the last node is behind.", "run", "policy"),
    _gauge("astraflow_dataflow_nodes_connected", "Nodes with an open working session.", "run"),
    _gauge("astraflow_dataflow_pool_target_nodes", "Nodes that a pool should have.", "run", "pool"),
    _gauge("astraflow_dataflow_autoscaling_share", "wait, busy, staleness of a window.", "run", "share"),
    _gauge("astraflow_dataflow_autoscaling_turns", "Changes of direction of the target.", "run"),
    # raas
    _counter("astraflow_raas_leases_total", "Leases taken, by task's purpose.", "purpose"),
    _counter("astraflow_raas_leases_ended_total", "Leases ended, by outcome.", "outcome"),
    _counter("astraflow_raas_episodes_total", "Episodes run, by outcome.", "outcome"),
    _histogram("astraflow_raas_episode_seconds", "Duration of episodes, waiting included."),
    _counter("astraflow_raas_expert_routings_total", "Trajectories whose experts are asked for.", "outcome"),
    _counter("astraflow_raas_pushes_total", "Pushes by the server's outcome.", "outcome"),
    _gauge("astraflow_raas_unacked_episodes", "Episodes finished but not acknowledged."),
    _gauge("astraflow_raas_start_seconds", "Process start to each stage of joining.", "stage"),
    _gauge("astraflow_raas_spool_episodes", "Episodes kept, not yet safe ones included."),
    _counter("astraflow_raas_spool_faults_total", "Episodes that the disk did not take."),
    _gauge("astraflow_raas_tokens", "Tokens sampled since the node started.", "policy"),
    _gauge("astraflow_raas_serving_version", "Weight version the engine serves.", "policy"),
    _histogram("astraflow_raas_fetch_seconds", "Time to fetch a version.", "policy"),
    _histogram("astraflow_raas_apply_seconds", "Time to apply a version.", "policy"),
    _histogram("astraflow_raas_swap_seconds", "Time to load, swap and prove a version.", "policy"),
    _counter("astraflow_raas_version_failures_total", "Failed activations.", "policy", "reason"),
    _counter("astraflow_raas_weight_mismatches_total", "Engines that answer unlike their weights.", "policy"),
    _counter(
        "astraflow_raas_external_calls_total", "Attempts of calls to external endpoints.", "policy", "outcome"
    ),
    _counter("astraflow_raas_external_tokens_total", "Tokens that they bill.", "policy", "kind"),
    _counter("astraflow_raas_agent_episodes_total", "Episodes of agents.", "outcome"),
    _counter("astraflow_raas_agent_calls_total", "Requests of agents.", "role", "outcome"),
    _counter("astraflow_raas_agent_keys_refused_total", "Requests of agents without the key of an episode."),
    _gauge("astraflow_raas_max_episodes", "Episodes that the node runs at once at most."),
    _gauge("astraflow_raas_engine_sequences", "Sequences of its engines, by state.", "policy", "state"),
    _gauge("astraflow_raas_engine_tokens_per_second", "Tokens they sample.", "policy"),
    _gauge("astraflow_raas_engine_kv_usage", "Share of their key-value memory.", "policy"),
    _counter("astraflow_raas_engine_losses_total", "Engines that died or hung.", "policy"),
    # environment service
    _gauge("astraflow_environment_workers", "Worker processes that are loaded."),
    _gauge("astraflow_environment_open_sessions", "Sessions that hold a place in a worker."),
    _counter("astraflow_environment_sessions_total", "Sessions by how they ended.", "end"),
    _histogram("astraflow_environment_call_seconds", "Calls of an environment, its own time.", "call"),
    # trainer
    _counter("astraflow_trainer_damaged_checkpoints_total", "Checkpoints put aside at a start."),
    _gauge("astraflow_trainer_step", "Last finished step.", "policy"),
    _gauge("astraflow_trainer_reward", "Mean reward of the last step's batch.", "policy"),
    _gauge(
        "astraflow_trainer_completion_tokens",
        "Tokens generated a trajectory, in the last step's batch: mean, p50, p90, max.",
        "policy",
        "stat",
    ),
    _gauge("astraflow_trainer_truncated", "Share of them that a limit cut off.", "policy"),
    _gauge("astraflow_trainer_zero_signal", "Share of its groups whose rewards were all alike.", "policy"),
    _gauge("astraflow_trainer_staleness_versions", "Of its tokens: mean, max.", "policy", "stat"),
    _gauge("astraflow_trainer_gradient_norm", "Before clipping.", "policy"),
    _gauge(
        "astraflow_trainer_clipped", "Share of tokens cut from above (up), below (down).", "policy", "side"
    ),
    _gauge("astraflow_trainer_ratio_max", "Largest ratio to the anchor.", "policy"),
    _counter("astraflow_trainer_seconds_total", "Time by part of a step: wait, train.", "policy", "part"),
    _gauge("astraflow_trainer_entropy_nats", "Of the next token, in the last step.", "policy"),
    _gauge("astraflow_trainer_mismatch_kl_nats", "KL(engine, trainer) per token.", "policy"),
    _counter(
        "astraflow_trainer_tracker_missed_steps_total",
        "Steps that an experiment tracker does not have.",
        "tracker",
    ),
    _histogram("astraflow_trainer_publish_blocked_seconds", "Training held, a step.", "cause"),
    _histogram("astraflow_trainer_checkpoint_blocked_seconds", "Likewise, a step.", "cause"),
    # weights
    # engine
    _gauge("astraflow_engine_requests", "Requests in the engine by state.", "state"),
    _gauge("astraflow_engine_tokens", "Tokens since the engine started, by kind.", "kind"),
    _gauge("astraflow_engine_tokens_per_second", "Generated tokens per second, last window."),
    _gauge("astraflow_engine_weight_swaps", "Weight swaps since the engine started."),
)

SCHEMA: dict[str, Metric] = {entry.name: entry for entry in _ENTRIES}

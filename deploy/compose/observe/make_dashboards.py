"""Writes `dashboards/*.json` for Grafana from the tables below. Run by `make dashboards`.

A panel is a title, a unit, and expressions over the metrics of `astraflow_kit.metric_schema`; a test holds the names
and the labels against that table.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 8, 7

# Title, Grafana's unit, and legend with expression; three panels a line.
Panel = tuple[str, str, dict[str, str]]
RATE = "[$__rate_interval]"


def quantile(metric: str, *labels: str) -> str:
    """The 95th percentile of a histogram."""
    return f"histogram_quantile(0.95, sum by ({', '.join(('le', *labels))}) (rate({metric}_bucket{RATE})))"


TRAINING: list[Panel] = [
    ("Version", "none", {"{{policy}}": "max by (policy) (astraflow_dataflow_version)"}),
    (
        "Steps per minute",
        "none",
        {
            "{{policy}} {{stage}}": f"60 * sum by (policy, stage) (rate(astraflow_dataflow_steps_total{RATE}))",
        },
    ),
    (
        "Groups by verdict",
        "none",
        {
            "{{policy}} {{verdict}}": f"60 * sum by (policy, verdict) (rate(astraflow_dataflow_groups_total{RATE}))",
        },
    ),
    (
        "Groups waiting",
        "none",
        {
            "{{policy}} ready": "max by (policy) (astraflow_dataflow_ready_groups)",
            "{{policy}} outstanding": "max by (policy) (astraflow_dataflow_outstanding_groups)",
            "{{policy}} may be leased": "max by (policy) (astraflow_dataflow_credit_groups)",
        },
    ),
    (
        "Groups that survive filters",
        "percentunit",
        {"{{policy}}": "max by (policy) (astraflow_dataflow_acceptance)"},
    ),
    ("Trajectories by place", "none", {"{{place}}": "max by (place) (astraflow_dataflow_trajectories)"}),
    ("Nodes connected", "none", {"nodes": "sum(astraflow_dataflow_nodes_connected)"}),
    (
        "Faults",
        "none",
        {
            "trajectories unaccounted for": "max(astraflow_dataflow_conservation_error)",
            "weight versions": "max(astraflow_dataflow_weight_faults)",
            "{{plugin}} {{kind}}": "max by (plugin, kind) (astraflow_dataflow_plugin_faults)",
        },
    ),
    (
        "Training held by publishing (p95)",
        "s",
        {"{{cause}}": quantile("astraflow_trainer_publish_blocked_seconds", "cause")},
    ),
]
NODES: list[Panel] = [
    (
        "Tokens per second",
        "none",
        {"{{instance}} {{policy}}": "astraflow_raas_engine_tokens_per_second"},
    ),
    (
        "Sequences in engines",
        "none",
        {"{{instance}} {{state}}": "sum by (instance, state) (astraflow_raas_engine_sequences)"},
    ),
    ("Key-value memory in use", "percentunit", {"{{instance}} {{policy}}": "astraflow_raas_engine_kv_usage"}),
    (
        "Episodes per minute",
        "none",
        {"{{outcome}}": f"60 * sum by (outcome) (rate(astraflow_raas_episodes_total{RATE}))"},
    ),
    ("Episode, p95", "s", {"{{instance}}": quantile("astraflow_raas_episode_seconds", "instance")}),
    (
        "Episodes not safe yet",
        "none",
        {
            "{{instance}} not acknowledged": "astraflow_raas_unacked_episodes",
            "{{instance}} on disk": "astraflow_raas_spool_episodes",
        },
    ),
    ("Version served", "none", {"{{instance}} {{policy}}": "astraflow_raas_serving_version"}),
    (
        "A new version, p95",
        "s",
        {
            "{{policy}} fetch": quantile("astraflow_raas_fetch_seconds", "policy"),
            "{{policy}} apply": quantile("astraflow_raas_apply_seconds", "policy"),
            "{{policy}} swap": quantile("astraflow_raas_swap_seconds", "policy"),
        },
    ),
    (
        "What went wrong per minute",
        "none",
        {
            "{{policy}} engine lost": f"60 * sum by (policy) (rate(astraflow_raas_engine_losses_total{RATE}))",
            "{{reason}}": f"60 * sum by (reason) (rate(astraflow_raas_version_failures_total{RATE}))",
            "lease expired": f"60 * sum(rate(astraflow_dataflow_leases_expired_total{RATE}))",
        },
    ),
]
CALLS: list[Panel] = [
    ("Rpcs per second", "reqps", {"{{rpc}}": f"sum by (rpc) (rate(astraflow_rpcs_total{RATE}))"}),
    (
        "Refused and failed",
        "reqps",
        {"{{rpc}} {{code}}": f'sum by (rpc, code) (rate(astraflow_rpcs_total{{code!="OK"}}{RATE}))'},
    ),
    ("Rpc, p95", "s", {"{{rpc}}": quantile("astraflow_rpc_seconds", "rpc")}),
    ("Push to commit, p95", "s", {"push": quantile("astraflow_dataflow_push_seconds")}),
]
DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "training": ("AstraFlow: training", TRAINING),
    "nodes": ("AstraFlow: nodes", NODES),
    "calls": ("AstraFlow: calls", CALLS),
}


def main() -> int:
    """Write every dashboard."""
    for name, (title, panels) in DASHBOARDS.items():
        text = json.dumps(dashboard(name, title, panels), indent=1)
        (HERE / "dashboards" / f"{name}.json").write_text(f"{text}\n")
    return 0


def dashboard(name: str, title: str, panels: list[Panel]) -> dict[str, object]:
    """One dashboard as Grafana imports it."""
    return {
        "uid": f"astraflow-{name}",
        "title": title,
        "tags": ["astraflow"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": [panel(number, *each) for number, each in enumerate(panels)],
    }


def panel(number: int, title: str, unit: str, targets: dict[str, str]) -> dict[str, object]:
    """One graph, in its place."""
    source = {"type": "prometheus", "uid": "prometheus"}
    line, column = divmod(number, 24 // WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": line * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
            for place, (legend, expression) in enumerate(targets.items())
        ],
    }


if __name__ == "__main__":
    sys.exit(main())

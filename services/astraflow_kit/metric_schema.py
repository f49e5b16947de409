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
BYTES = tuple(float(4**power) for power in range(5, 18))
COUNTS = tuple(float(2**power) for power in range(17))


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
    # dataflow
    # raas
    # trainer
    # weights
    # engine
    Metric("astraflow_engine_requests", Kind.GAUGE, "Requests in the engine by state.", ("state",)),
    Metric("astraflow_engine_tokens", Kind.GAUGE, "Tokens since the engine started, by kind.", ("kind",)),
    Metric("astraflow_engine_tokens_per_second", Kind.GAUGE, "Generated tokens per second, last window."),
    Metric("astraflow_engine_weight_swaps", Kind.GAUGE, "Weight swaps since the engine started."),
)

SCHEMA: dict[str, Metric] = {entry.name: entry for entry in _ENTRIES}

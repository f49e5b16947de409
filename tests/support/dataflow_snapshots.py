"""Plain snapshots of a run with one policy and one node; tests change single fields with `replace`.

Used by the unit tests of what is computed from an audit.
"""

from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow_dataflow.records import Audit, Life, PolicyState, StoredEvaluation

POLICY = PolicyState(
    policy_id="p",
    frozen=False,
    external=False,
    outstanding=0,
    ready=0,
    unpublished=0,
    credit=4,
    acceptance=1.0,
    groups_per_step=2,
    epoch=1,
    finished_step=0,
    durable_step=0,
    version=0,
    finish_ms=0,
    wait="",
    wait_since_ms=0,
    wait_until_ms=0,
    staleness={},
    recent=(),
    unpublished_steps=(),
    last_consumed="",
    charged=0,
    max_staleness=1,
    no_credit=0,
    settled=0,
    trainer="t",
    heard_ms=1000,
)
AUDIT = Audit(
    now_ms=1000,
    life=Life.ACTIVE,
    counters={},
    is_whole=True,
    held_assembling=0,
    held_ready=0,
    held_in_batch=0,
    dead_letters=0,
    queued_tasks=1,
    exhausted=False,
    retries=0,
    policies=(POLICY,),
    admitted=4,
)
NODE = NodeStatus(
    node_id="n",
    incarnation=1,
    max_concurrent_tasks=1,
    serving_versions={"p": 0, "q": 0, "judge": 0},
    connected=True,
)


def node(**changes: object) -> NodeStatus:
    """The node with other values."""
    merged = NodeStatus()
    merged.MergeFrom(NODE)
    merged.MergeFrom(NodeStatus(**changes))  # type: ignore[arg-type]
    merged.connected = bool(changes.get("connected", True))
    return merged


EVALUATION = StoredEvaluation(
    evaluation_id="e",
    versions={"p": 0},
    planned=4,
    samples_per_task=1,
    final=False,
    state="open",
    fed=4,
    done=0,
    failed=0,
    samples={},
    rewards={},
    metrics={},
    complete_ms=0,
)

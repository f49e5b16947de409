"""What a run's server knows of versions that must stay.

Invariant: an answer is the server's, whole and of now, or there is none: whoever cannot ask does not collect. The
trainer's collector and `astraflow weights gc` call it.
"""

from astraflow.client import Client
from astraflow.dataflow.v1 import admin_service_pb2, run_service_pb2, version_service_pb2
from astraflow_weights.collection.retention import Roots
from astraflow_weights.versions.standing import ServerStanding

_PAGE = 1000


def server_roots(client: Client, *, run_id: str, policy_id: str) -> Roots:
    """Pinned versions, versions that nodes serve, the newest announced one, and what else the server knows of the
    policy. Raises as the client does.
    """
    request = version_service_pb2.ListVersionsRequest(run_id=run_id, policy_id=policy_id, page_size=_PAGE)
    pages = list(client.pages(client.versions.ListVersions, request))
    nodes = client.pages(
        client.admin.ListNodes, admin_service_pb2.ListNodesRequest(run_id=run_id, page_size=_PAGE)
    )
    announced = max((version.version for page in pages for version in page.versions), default=None)
    return Roots(
        pinned=frozenset(pin.version for page in pages for pin in page.pins),
        served=frozenset(
            node.serving_versions[policy_id]
            for page in nodes
            for node in page.nodes
            if policy_id in node.serving_versions
        ),
        announced=announced,
        standing=_standing(client, run_id=run_id, policy_id=policy_id, announced=announced),
    )


def _standing(client: Client, *, run_id: str, policy_id: str, announced: int | None) -> ServerStanding:
    identity = client.call(client.runs.GetRun, run_service_pb2.GetRunRequest(run_id=run_id)).run.identity
    status = client.call(client.admin.Status, admin_service_pb2.StatusRequest(run_id=run_id))
    policy = next(item for item in status.policies if item.policy_id == policy_id)
    return ServerStanding(
        identity=identity,
        finished_step=policy.last_finished_step,
        version=announced,
    )

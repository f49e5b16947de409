"""Fixtures shared by the integration tests."""

from support.dataflow_fixtures import (
    cluster,
    own_valkey,
    process,
    pytest_generate_tests,
    redis_binary,
    redis_url,
    shared_cluster,
    valkey,
    world,
)
from support.node_fixtures import checkpoint, shared_engine
from support.sglang_server import on_cpu
from support.weight_fixtures import ask, bucket, net, proxy, quiet, radosgw, s3_server, weight_store

__all__ = [
    "cluster",
    "own_valkey",
    "process",
    "pytest_generate_tests",
    "redis_binary",
    "redis_url",
    "valkey",
    "world",
]
__all__ += ["shared_cluster"]
__all__ += ["checkpoint", "on_cpu", "shared_engine"]
__all__ += ["ask", "bucket", "net", "proxy", "quiet", "radosgw", "s3_server", "weight_store"]

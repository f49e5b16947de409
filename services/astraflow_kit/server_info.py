"""What a daemon says of itself to callers that know nothing of it yet. Called by the servicers' GetServerInfo."""

from collections.abc import Iterable

from astraflow import __version__
from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow.server.v1 import server_info_pb2

OLDEST_CONTRACT_VERSION = CONTRACT_VERSION
"""Lower it below the contract version only with code that answers such callers, and with a test of it."""


def server_info(capabilities: Iterable[str] = ()) -> server_info_pb2.ServerInfo:
    """Release, contract versions and clock of this process, with the optional features that are on."""
    info = server_info_pb2.ServerInfo(
        product_version=__version__,
        contract_version=CONTRACT_VERSION,
        oldest_contract_version=OLDEST_CONTRACT_VERSION,
        capabilities=sorted(capabilities),
    )
    info.server_time.GetCurrentTime()
    return info

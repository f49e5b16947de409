"""Whether this package and a server understand each other: a comparison of contract versions.

Invariant: the version of this package is the one that its contracts carry, so it cannot differ from what is
generated. Called by `client`; daemons introduce themselves with it.
"""

from astraflow import __version__
from astraflow.errors import IncompatibleError
from astraflow.options.v1 import options_pb2
from astraflow.server.v1 import server_info_pb2

CONTRACT_VERSION: int = server_info_pb2.DESCRIPTOR.GetOptions().Extensions[options_pb2.contract_version]
"""Contract version that this package was made for."""


def require_compatible(server: server_info_pb2.ServerInfo, *, address: str) -> None:
    """Raise IncompatibleError unless a caller of this package's contract version may call the server."""
    oldest, newest = server.oldest_contract_version, server.contract_version
    if oldest <= CONTRACT_VERSION <= newest:
        return
    spoken = f"{oldest} to {newest}" if oldest < newest else f"{newest}"
    older = "client" if oldest > CONTRACT_VERSION else "server"
    remedy = f"install astraflow=={server.product_version} here"
    if server.product_version == __version__:
        remedy = f"install the build that the server has: both are called {__version__}, and differ"
    raise IncompatibleError(
        f"the server at {address} (astraflow {server.product_version}) speaks contract version {spoken}, this "
        f"client (astraflow {__version__}) {CONTRACT_VERSION}: update the {older}, or {remedy}"
    )

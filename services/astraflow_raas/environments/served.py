"""The environments that this node's settings name, with a connection to each.

Invariant: addresses come from the settings of the node, never from a recipe; episodes share the connection of a name. A
lifecycle `Service`; asked by `recipe_environments`.
"""

import asyncio
import hmac
from collections.abc import Mapping

from astraflow.client import AsyncClient, Connection
from astraflow.plugins import MissingCapability
from astraflow_kit.identity.sealing import Session, claimed_session
from astraflow_raas.environments.remote import RemoteEnvironment


class ServedEnvironments:
    """Opens sessions by name; connects when the first is opened."""

    def __init__(self, connections: Mapping[str, Connection] | None = None) -> None:
        self._connections = dict(connections or {})
        self._node: Session | None = None
        self._clients: dict[str, AsyncClient] = {}
        self._stopping = asyncio.Event()

    def speak_as(self, credential: str) -> None:
        """Open sessions as the node of this credential, of which a service learns nothing that is of use elsewhere."""
        self._node = claimed_session(credential)

    def require(self, name: str) -> None:
        """Raise MissingCapability unless the settings name it."""
        if name not in self._connections:
            known = ", ".join(self._connections) or "none"
            raise MissingCapability(
                f"this node knows no served environment {name!r} (known: {known}); serve it with `astraflow "
                f"environment --use MODULE:CLASS --port PORT`, and start the node with --environment {name}=HOST:PORT"
            )

    def open(self, name: str, *, turn_timeout_s: float) -> RemoteEnvironment:
        """What one episode acts in. Raises MissingCapability."""
        self.require(name)
        if name not in self._clients:
            self._clients[name] = AsyncClient(self._connections[name])
        return RemoteEnvironment(
            self._clients[name],
            name=name,
            turn_timeout_s=turn_timeout_s,
            holder=self._holder_at(self._connections[name].address),
            incarnation=self._node.number if self._node else 0,
        )

    def _holder_at(self, address: str) -> str:
        """A secret of the node that outlives its process, another one for each service."""
        if self._node is None:
            return ""
        return hmac.digest(self._node.lineage.encode(), address.encode(), "sha256").hex()

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Wait for `stop`."""
        await self._stopping.wait()

    async def stop(self, *, deadline_s: float) -> None:
        """Close the connections."""
        self._stopping.set()
        for client in self._clients.values():
            await client.close()

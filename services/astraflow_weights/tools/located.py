"""Which policy's versions a command looks at: those of a server's run, or those in a store that is named.

Invariant: with `--store` no server is asked for anything; without it, store, run and policy are the server's
and whoever cannot tell them apart is asked to, never guessed for. `astraflow weights` calls it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from astraflow.client import Client
from astraflow.commands.nodes import all_nodes
from astraflow.commands.server import RunOptions
from astraflow.dataflow.v1 import (
    admin_service_pb2,
    run_service_pb2,
    version_pb2,
    version_service_pb2,
)
from astraflow.errors import InvalidArgumentError, NotFoundError, UnavailableError
from astraflow_kit.settings import load
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.versions.log import VersionLog

THREADS = 8
"""Requests to the store at a time."""
_PAGE = 1000

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URI",
        help="Read this store, file:///… or s3://bucket/prefix, and ask no server; needs --run-id and --policy.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; docs/weights.md says which fields.")]
VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Version to look at.")]
PolicyOption = Annotated[
    str, typer.Option("--policy", help="Policy to look at. Default: the run's only one.")
]


@dataclass(frozen=True, kw_only=True)
class PolicyOfServer:
    """A policy of a run that a server knows."""

    client: Client
    run_id: str
    policy_id: str
    store_uri: str

    def pins(self) -> dict[int, str]:
        """Reasons by pinned version."""
        return {pin.version: pin.reason for page in self._pages() for pin in page.pins}

    def announced(self) -> list[version_pb2.Version]:
        """Versions that nodes may activate, newest first."""
        return [version for page in self._pages() for version in page.versions]

    def nodes(self) -> list[admin_service_pb2.NodeStatus]:
        """The nodes of the run, with what each says it serves."""
        return list(all_nodes(self.client, run_id=self.run_id))

    def _pages(self) -> Iterator[version_service_pb2.ListVersionsResponse]:
        request = version_service_pb2.ListVersionsRequest(
            run_id=self.run_id, policy_id=self.policy_id, page_size=_PAGE
        )
        return self.client.pages(self.client.versions.ListVersions, request)


@dataclass(frozen=True, kw_only=True)
class StoredPolicy:
    """A policy's versions in a store, read up to now. `server` is None when none was asked."""

    store: ObjectStore
    log: VersionLog
    server: PolicyOfServer | None

    def check_version(self, version: int) -> int:
        """Return `version`. Raises NotFoundError when the log does not hold it."""
        if not 0 <= version < len(self.log.records):
            held = f"it holds 0 to {len(self.log.records) - 1}" if self.log.records else "it holds none"
            raise NotFoundError(
                f"there is no version {version} of policy {self.log.policy_id!r} of run {self.log.run_id!r} in "
                f"{self.store.uri}: {held}; look at `astraflow weights list`"
            )
        return version


@dataclass(frozen=True, kw_only=True)
class ServerPolicyOptions(RunOptions):
    """The options of a command that asks a server about one policy."""

    policy: PolicyOption = ""
    json_: JsonOption = False

    @contextmanager
    def of_server(self) -> Iterator[PolicyOfServer]:
        """Yield the policy that a server knows by these names. Raises InvalidArgumentError when it is not one."""
        with self.client() as client:
            run = client.call(client.runs.GetRun, run_service_pb2.GetRunRequest(run_id=self.run_id)).run
            request = admin_service_pb2.StatusRequest(run_id=run.run_id)
            status = client.call(client.admin.Status, request)
            yield PolicyOfServer(
                client=client,
                run_id=run.run_id,
                policy_id=_chosen([policy.policy_id for policy in status.policies], asked=self.policy),
                store_uri=run.store_uri,
            )


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ServerPolicyOptions):
    """The options of a command that reads a policy's versions in its store."""

    store: StoreOption = None

    @contextmanager
    def stored(self) -> Iterator[StoredPolicy]:
        """Yield the policy that these options name. Raises RequestError when they name none, and as store, log
        and server do.
        """
        if self.store is not None:
            if not self.run_id or not self.policy:
                raise InvalidArgumentError("--store reads without a server: say --run-id and --policy, too")
            yield read_policy(self.store, run_id=self.run_id, policy_id=self.policy)
            return
        _require_server(self)
        with self.of_server() as server:
            yield read_policy(
                server.store_uri, run_id=server.run_id, policy_id=server.policy_id, server=server
            )


def _require_server(options: RunOptions) -> None:
    """A run that has ended left its versions: say how to look at them."""
    try:
        options.server()
    except UnavailableError as error:
        raise UnavailableError(
            f"{error.message}. Its versions outlive it: --store file://FOLDER/store (or what `astraflow dev --store` "
            "was given) --run-id RUN --policy POLICY"
        ) from error


def _chosen(known: list[str], *, asked: str) -> str:
    if asked in known:
        return asked
    if asked:
        raise InvalidArgumentError(f"the run has no policy {asked!r}; it has {', '.join(known)}")
    if len(known) != 1:
        raise InvalidArgumentError(
            f"the run has {len(known)} policies; choose one: --policy {'|'.join(known)}"
        )
    return known[0]


def read_policy(
    uri: str, *, run_id: str, policy_id: str, server: PolicyOfServer | None = None
) -> StoredPolicy:
    """Read a policy's log. Raises NotFoundError for a folder that is none, and as the store does."""
    _require_folder(uri)
    store = open_store(uri, settings=load(StoreAccess).store)
    try:
        log = VersionLog(store, run_id=run_id, policy_id=policy_id)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error
    log.refresh()
    return StoredPolicy(store=store, log=log, server=server)


def _require_folder(uri: str) -> None:
    """Opening a `file://` store makes its folder, which a reader must not."""
    address = urlsplit(uri)
    if address.scheme == "file" and not Path(unquote(address.path)).is_dir():
        raise NotFoundError(
            f"the store {uri} is no folder of this machine: run this where its trainer runs, or name another --store"
        )


def share_text(share: float) -> str:
    """A share of elements for people."""
    return f"{100 * share:.3f} %"

"""`astraflow weights rollback`: publish the weights of an older version again, as the newest one.

Invariant: no trainer that lives is fenced unless that was asked for; killed at any instant and called again, there
is one new version, and it is announced. JSON fields are documented in docs/weights.md.
"""

import os
import secrets
import socket
from typing import Annotated, Any

import stamina
import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.wording import count_text, print_json
from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.errors import InvalidArgumentError, PolicyHeldError, RetryableError
from astraflow_weights.errors import StateInDoubt
from astraflow_weights.publish.announcing import Announcer
from astraflow_weights.publish.rollback import roll_back
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.located import PolicyOfServer, PolicyOptions, StoredPolicy
from astraflow_weights.versions.identity import read_identity
from astraflow_weights.versions.manifest import NONCE_BYTES
from astraflow_weights.versions.standing import Known, ServerStanding, compare

_RETRY_S = 60.0

TakeOverOption = Annotated[
    bool,
    typer.Option(
        "--take-over", help="Do not ask whether a trainer holds the policy; one that does is fenced and ends."
    ),
]


@grouped_options
def rollback(
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Version to go back to.")],
    options: PolicyOptions,
    take_over: TakeOverOption = False,
) -> None:
    """Publish the weights of VERSION again, as the newest version; its trainer goes on from them.

    The policy's trainer must have been stopped. Doing it twice makes one version.
    """
    with options.stored() as found:
        found.check_version(version)
        result = _go_back(found, version=version, take_over=take_over)
    if options.json_:
        print_json(result)
    else:
        typer.echo(_sentence(result))


def _go_back(found: StoredPolicy, *, version: int, take_over: bool) -> dict[str, Any]:
    newest, old = found.log.records[-1], found.log.record(version)
    if newest.model_root == old.model_root and not _lacks_announcement(found.server, newest.version):
        announced = found.server is not None
        return _result(version, newest.version, made=False, announced=announced, size_bytes=0)
    epoch, nonce = _claim(found, take_over=take_over), secrets.token_bytes(NONCE_BYTES)
    for attempt in stamina.retry_context(on=RetryableError, attempts=None, timeout=_RETRY_S):
        with attempt:
            writer = VersionWriter.open(
                found.store, run_id=found.log.run_id, policy_id=found.log.policy_id, epoch=epoch, nonce=nonce
            )
            committed = roll_back(found.store, writer, version=version)
    if found.server is not None:
        server = found.server
        announcer = Announcer(server.client, run_id=server.run_id, policy_id=server.policy_id, epoch=epoch)
        announcer.announce_missing(writer)
    return _result(
        version,
        committed.version,
        made=not committed.existed,
        announced=found.server is not None,
        size_bytes=0 if committed.existed else committed.delta_bytes + committed.snapshot_bytes,
    )


def _lacks_announcement(server: PolicyOfServer | None, version: int) -> bool:
    """Without a server nobody can be result; whoever trains on announces it."""
    return server is not None and all(announced.version != version for announced in server.announced())


def _claim(found: StoredPolicy, *, take_over: bool) -> int:
    """An epoch to write under, above every one in the log. Raises PolicyHeldError, saying what to do."""
    known_epoch = found.log.owner.epoch if found.log.owner else 0
    if found.server is None:
        if not take_over:
            raise InvalidArgumentError(
                "--store asks no server, so nobody can say whether a trainer still writes this policy; when none "
                "runs, add --take-over (one that does is fenced and ends)"
            )
        return known_epoch + 1
    server = found.server
    request = batch_service_pb2.ClaimPolicyRequest(
        run_id=server.run_id,
        policy_id=server.policy_id,
        trainer_id=f"rollback:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        known_epoch=known_epoch,
        only_if_unheld=not take_over,
    )
    try:
        for attempt in stamina.retry_context(on=RetryableError, attempts=None, timeout=_RETRY_S):
            with attempt:
                claim = server.client.call(server.client.batches.ClaimPolicy, request)
    except PolicyHeldError as error:
        raise PolicyHeldError(
            f"{error.message}: --take-over. A trainer is stopped by SIGTERM, by its rpc StopAfterStep, or with "
            "the `astraflow dev` that started it",
            metadata=error.metadata,
        ) from error
    server.client.session = claim.session
    _require_agreement(found, claim)
    return claim.trainer_epoch


def _require_agreement(found: StoredPolicy, claim: batch_service_pb2.ClaimPolicyResponse) -> None:
    """Announcing to a server whose Redis lost steps would hide that it did."""
    found.log.refresh_entries()
    keys = PolicyKeys(found.log.run_id, found.log.policy_id)
    known = Known(store_identity=read_identity(found.store, keys), versions=found.log.records)
    server = ServerStanding(
        identity=claim.identity,
        finished_step=claim.last_finished_step,
        version=claim.version if claim.HasField("version") else None,
    )
    if (doubt := compare(server, known)) is not None:
        raise StateInDoubt(doubt.message)


def _result(version: int, newest: int, *, made: bool, announced: bool, size_bytes: int) -> dict[str, Any]:
    return {
        "rollback_of": version,
        "version": newest,
        "made": made,
        "announced": announced,
        "size_bytes": size_bytes,
    }


def _sentence(result: dict[str, Any]) -> str:
    old, new = result["rollback_of"], result["version"]
    if old == new:
        return f"version {old} is the newest one; nothing to do"
    if not result["made"]:
        return f"version {new}, the newest one, has the weights of version {old} already; nothing to do"
    made = f"version {new} has the weights of version {old} ({count_text(result['size_bytes'])} bytes)"
    if result["announced"]:
        return f"{made}; nodes go there now, and the next trainer goes on from it"
    return f"{made}; the next trainer announces it and goes on from it"

"""What the contract says of one rpc (who may call it, how it refuses, what it lacks) and of one field (its bounds).

Invariant: all of it comes from the options of the `.proto` files and nowhere else. Called by the kit, which
serves nothing that is not so, and by tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from astraflow.errors import EVERY_RPC, UnimplementedError
from astraflow.options.v1 import options_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message

__all__ = ["ContractError", "RpcContract", "bounds_of", "read_contract"]


class ContractError(Exception):
    """A defect of the contracts or of a servicer: they do not fit, or an rpc lacks an option."""


@dataclass(frozen=True, kw_only=True)
class RpcContract:
    """What callers may rely on."""

    name: str
    roles: frozenset[str]
    scope: str
    """Which runs a call is about, where its request does not name one: an `astraflow.options.v1.Scope` in small
    letters; `unspecified` where the request does."""
    speaker: str
    """As whom it speaks, likewise: an `astraflow.options.v1.Speaker`; `unspecified` where the token alone decides."""
    reasons: frozenset[str]
    """Slugs by which it may refuse a call."""
    capability: str = ""
    """What it lacks; empty when it works."""
    instead: str = ""

    def may_answer(self, reason: str) -> bool:
        """Whether the contract lists `reason`."""
        return reason in self.reasons or (reason == UnimplementedError.reason and bool(self.capability))

    def require_implemented(self) -> None:
        """Raise UnimplementedError when this release does not provide the rpc."""
        if self.capability:
            message = f"{self.name} needs {self.capability}, which this release does not have; {self.instead}"
            raise UnimplementedError(message, metadata={"capability": self.capability})


def bounds_of(message: type[Message], field: str) -> options_pb2.Bounds:
    """The values that a field may have; an empty message when it takes every value of its type."""
    bounds: options_pb2.Bounds = (
        message.DESCRIPTOR.fields_by_name[field].GetOptions().Extensions[options_pb2.bounds]
    )
    return bounds


def read_contract(method: MethodDescriptor) -> RpcContract:
    """The contract of one rpc. Raises ContractError for one without roles or retry rule."""
    options = method.GetOptions().Extensions
    roles = options[options_pb2.roles]
    if not roles or options_pb2.ROLE_UNSPECIFIED in roles:
        raise ContractError(f"rpc {method.full_name} names no caller; add (astraflow.options.v1.roles)")
    if options[options_pb2.retry] == options_pb2.RETRY_UNSPECIFIED:
        raise ContractError(f"rpc {method.full_name} has no retry rule; add (astraflow.options.v1.retry)")
    common = method.containing_service.GetOptions().Extensions[options_pb2.common_errors]
    missing = options[options_pb2.missing]
    return RpcContract(
        name=method.full_name,
        roles=frozenset(options_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in roles),
        scope=options_pb2.Scope.Name(options[options_pb2.scope]).removeprefix("SCOPE_").lower(),
        speaker=options_pb2.Speaker.Name(options[options_pb2.speaker]).removeprefix("SPEAKER_").lower(),
        reasons=frozenset((*EVERY_RPC, *common.reasons, *options[options_pb2.errors].reasons)),
        capability=missing.capability,
        instead=missing.instead,
    )

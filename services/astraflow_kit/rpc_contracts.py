"""What the contracts say of each rpc a server serves, and whether its servicers are what they say.

Invariant: roles, retry rule, errors and missing capability come from the options of the `.proto` files and
nowhere else; a server whose servicers differ from them does not start. Called by `serve`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from astraflow.errors import EVERY_RPC, UnimplementedError
from astraflow.options.v1 import options_pb2

Registration = tuple[Callable[[Any, Any], None], object]
"""A generated `add_…Servicer_to_server` and the servicer to add."""


class ContractError(Exception):
    """A defect of the contracts or of a servicer: they do not fit, or an rpc lacks an option."""


@dataclass(frozen=True, kw_only=True)
class RpcContract:
    """What callers may rely on."""

    name: str
    roles: frozenset[str]
    reasons: frozenset[str]
    """Slugs by which it may refuse a call."""
    capability: str = ""
    """What it lacks; empty when it works."""
    instead: str = ""

    def require_implemented(self) -> None:
        """Raise UnimplementedError when this release does not provide the rpc."""
        if self.capability:
            message = f"{self.name} needs {self.capability}, which this release does not have; {self.instead}"
            raise UnimplementedError(message, metadata={"capability": self.capability})


def served_contracts(registrations: Sequence[Registration]) -> dict[str, dict[str, RpcContract]]:
    """The contract of every rpc, keyed `/package.Service/Method`, by service name. Raises ContractError."""
    found: dict[str, dict[str, RpcContract]] = {}
    for add, servicer in registrations:
        collector = _NameCollector()
        add(servicer, collector)
        for name in collector.names:
            methods = descriptor_pool.Default().FindServiceByName(name).methods
            found[name] = {f"/{name}/{method.name}": _fitting(method, servicer) for method in methods}
    return found


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
        reasons=frozenset((*EVERY_RPC, *common.reasons, *options[options_pb2.errors].reasons)),
        capability=missing.capability,
        instead=missing.instead,
    )


def unknown_rpc(rpc: str, *, served: Mapping[str, object]) -> UnimplementedError:
    """The answer to a call of an rpc that no registered service has."""
    remedy = f"it serves {', '.join(sorted(served))}; call the daemon that has it, or update this one"
    return UnimplementedError(f"this server has no rpc {rpc}: {remedy}", metadata={"capability": rpc})


def _fitting(method: MethodDescriptor, servicer: object) -> RpcContract:
    contract = read_contract(method)
    has_it = not getattr(type(servicer), method.name).__module__.endswith("_pb2_grpc")
    if has_it and contract.capability:
        raise ContractError(
            f"{type(servicer).__name__} has {method.full_name}: drop (…missing) from its contract"
        )
    if not has_it and not contract.capability:
        raise ContractError(
            f"{type(servicer).__name__} lacks {method.full_name}: implement it, or say what is missing with "
            "(astraflow.options.v1.missing)"
        )
    return contract


class _NameCollector:
    """Stands in for a server to learn which services a generated `add_…_to_server` adds."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.ServiceRpcHandler]) -> None:
        self.names += [handler.service_name() for handler in handlers]

    def add_registered_method_handlers(self, service_name: str, handlers: object) -> None:
        """Names come with the generic handlers."""

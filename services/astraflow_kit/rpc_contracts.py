"""What the contracts say of each rpc a server serves, and whether its servicers are what they say.

Invariant: a server whose servicers differ from their contracts does not start. Called by `serve`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from astraflow._contract.rpcs import ContractError, RpcContract, read_contract
from astraflow.errors import UnimplementedError
from astraflow_kit.identity.scopes import fields_of
from astraflow_kit.identity.tokens import OPEN_TO_ALL

Registration = tuple[Callable[[Any, Any], None], object]
"""A generated `add_…Servicer_to_server` and the servicer to add."""


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


def unknown_rpc(rpc: str, *, served: Mapping[str, object]) -> UnimplementedError:
    """The answer to a call of an rpc that no registered service has."""
    remedy = f"it serves {', '.join(sorted(served))}; call the daemon that has it, or update this one"
    return UnimplementedError(f"this server has no rpc {rpc}: {remedy}", metadata={"capability": rpc})


def _fitting(method: MethodDescriptor, servicer: object) -> RpcContract:
    contract = read_contract(method)
    says = contract.scope != "unspecified" or OPEN_TO_ALL in contract.roles
    if not says and not fields_of(method.input_type, "run_id"):
        raise ContractError(
            f"the request of {method.full_name} names no run: give it one, or say which runs it is about with "
            "(astraflow.options.v1.scope)"
        )
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

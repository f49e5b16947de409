"""Translation between the error tree and gRPC's rich status, used by servers and clients alike.

A served error always carries `google.rpc.ErrorInfo` (domain `astraflow`, the reason slug, metadata) and,
where the caller should wait, `google.rpc.RetryInfo`. One about a field's bounds has `field`, `value` and `limit` in
its metadata, which every client of ours gives its caller, and `google.rpc.BadRequest` for other tools. An error without
`ErrorInfo` is classified by its status code alone.
"""

from typing import cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from astraflow import errors

DOMAIN = "astraflow"
_TOO_LARGE = "message larger than max"

_BY_CODE: dict[grpc.StatusCode, type[errors.AstraflowError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionError_,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnimplementedError,
    grpc.StatusCode.INTERNAL: errors.InternalError,
}


def to_status(error: errors.AstraflowError) -> status_pb2.Status:
    """Return the rich status that represents `error` on the wire."""
    details = [
        _packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    ]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    told = error.metadata
    if {"field", "value", "limit"} <= told.keys():
        description = f"{told['value']}, {told['limit']}"
        violation = error_details_pb2.BadRequest.FieldViolation(field=told["field"], description=description)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    return status_pb2.Status(
        code=grpc.StatusCode[error.code].value[0], message=error.message, details=details
    )


def from_rpc_error(error: grpc.RpcError) -> errors.AstraflowError:
    """Return the typed error for a failed call; the caller raises it `from` the original."""
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except ValueError:
        status = (
            None  # something in between refused the answer: its own code counts, not the details it passed on
        )
    if status is not None:
        typed = from_status(status)
        if typed is not None:
            return typed
    code = error.code()
    kind = _BY_CODE.get(code, errors.InternalError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in (error.details() or ""):
        # gRPC's own refusal of a message, on either side: it will not fit later either.
        return errors.InvalidArgumentError(
            f"{code.name}: {error.details()}; send less in one call: split it, or shorten the episode"
        )
    return kind(f"{code.name}: {error.details() or 'the server gave no message'}")


def is_silence(error: grpc.RpcError) -> bool:
    """Whether a deadline passed in the server's silence; one that it answers itself is an answer."""
    call = cast("grpc.Call", error)
    details = (key for key, _ in call.trailing_metadata() or ())
    return call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "grpc-status-details-bin" not in details


def from_status(status: status_pb2.Status) -> errors.AstraflowError | None:
    """Return the typed error a status describes, or None when it carries no `ErrorInfo` of ours."""
    info, retry_after_s = None, None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if info is None or info.domain != DOMAIN:
        return None
    kind = errors.ERRORS_BY_REASON.get(info.reason, errors.InternalError)
    return kind(status.message, metadata=dict(info.metadata), retry_after_s=retry_after_s)


def _packed(
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

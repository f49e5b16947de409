"""The one error tree of AstraFlow, shared by clients and servers.

    AstraflowError
    ├── RetryableError              call again (after `retry_after_s` where given)
    │   ├── UnavailableError        the service or its store cannot answer now
    │   ├── DeadlineError           no answer within the deadline
    │   ├── UnknownVersionError     the version is not announced yet
    │   ├── PayloadMissingError     a push was committed without its payload: push it again
    │   └── ResourceExhaustedError  a quota or watermark is reached
    ├── RequestError                fix the request; the same call will fail again
    │   ├── InvalidArgumentError    a field is out of its bound
    │   ├── InvalidTrajectoryError  a pushed trajectory fails validation
    │   ├── RecipeError             the recipe cannot be used
    │   ├── PluginError             a plug-in cannot be loaded or broke its Protocol
    │   ├── NotFoundError           no such run, policy, task, batch or version
    │   └── UntrustedServerError    a certificate does not prove what it must, or only one side speaks TLS
    ├── StateError                  give up what you hold; someone else moved on
    │   ├── FencedError             a newer trainer epoch or lease attempt exists
    │   ├── PolicyHeldError         a trainer holds the policy that was asked for only if nobody does
    │   ├── LeaseLostError          the lease expired or was handed on
    │   ├── ConflictError           the same id exists with other content
    │   ├── VersionGapError         versions in between are not announced: announce them first
    │   ├── PreconditionError       the run, step or batch is not in a state that allows this
    │   └── IncompatibleError       schema or protocol versions differ
    ├── PermissionError_            the identity's role may not call this
    ├── UnimplementedError          the contract names it, this release does not do it yet
    └── InternalError               a defect on the other side; the log there has the cause

Kinds are chosen by what the caller does next. `reason` is a stable slug that travels as
`google.rpc.ErrorInfo.reason`; `code` is the gRPC status name. Messages say what was wrong, its value, the
limit and the remedy; they are for people.
"""

from typing import ClassVar

__all__ = [
    "ERRORS_BY_REASON",
    "EVERY_RPC",
    "AstraflowError",
    "ConflictError",
    "DeadlineError",
    "FencedError",
    "IncompatibleError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidTrajectoryError",
    "LeaseLostError",
    "NotFoundError",
    "PayloadMissingError",
    "PermissionError_",
    "PluginError",
    "PolicyHeldError",
    "PreconditionError",
    "RecipeError",
    "RequestError",
    "ResourceExhaustedError",
    "RetryableError",
    "StateError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownVersionError",
    "UntrustedServerError",
    "VersionGapError",
]


class AstraflowError(Exception):
    """Base of every error that crosses a service boundary or reaches a user."""

    reason: ClassVar[str] = "UNKNOWN"
    code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, metadata: dict[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s


class RetryableError(AstraflowError):
    """The same call may succeed later without any change."""


class UnavailableError(RetryableError):
    """The service, or the store behind it, cannot answer now."""

    reason, code = "UNAVAILABLE", "UNAVAILABLE"


class DeadlineError(RetryableError):
    """No answer came within the call's deadline."""

    reason, code = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class UnknownVersionError(RetryableError):
    """A weight version that has not been announced to the server yet."""

    reason, code = "UNKNOWN_VERSION", "UNAVAILABLE"


class PayloadMissingError(RetryableError):
    """The payload that a commit refers to is gone: push the episode again."""

    reason, code = "PAYLOAD_MISSING", "ABORTED"


class ResourceExhaustedError(RetryableError):
    """A quota, a window or a memory watermark is reached."""

    reason, code = "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"


class RequestError(AstraflowError):
    """The request itself is wrong; sending it again will fail again."""


class InvalidArgumentError(RequestError):
    """A field is missing or out of its documented bound."""

    reason, code = "INVALID_ARGUMENT", "INVALID_ARGUMENT"


class InvalidTrajectoryError(RequestError):
    """A trajectory fails validation and was quarantined; it will never be trained on."""

    reason, code = "INVALID_TRAJECTORY", "INVALID_ARGUMENT"


class RecipeError(RequestError):
    """The recipe has an unknown key, a wrong type or an impossible combination."""

    reason, code = "INVALID_RECIPE", "INVALID_ARGUMENT"


class PluginError(RequestError):
    """A plug-in cannot be found, does not satisfy its Protocol, or raised."""

    reason, code = "PLUGIN_FAILED", "FAILED_PRECONDITION"


class NotFoundError(RequestError):
    """No such run, policy, task, batch, node or version."""

    reason, code = "NOT_FOUND", "NOT_FOUND"


class UntrustedServerError(RequestError):
    """Both sides cannot prove who they are to each other; raised by clients, before anything was sent."""

    reason, code = "UNTRUSTED_SERVER", "UNAVAILABLE"


class StateError(AstraflowError):
    """The world moved on: drop what you hold and start from a fresh read."""


class FencedError(StateError):
    """A newer trainer epoch, or a newer attempt of the lease, has taken over."""

    reason, code = "FENCED", "FAILED_PRECONDITION"


class PolicyHeldError(StateError):
    """A trainer holds the policy; metadata `holder` names it. Stop it first, or claim without asking."""

    reason, code = "POLICY_HELD", "FAILED_PRECONDITION"


class LeaseLostError(StateError):
    """The lease expired and was, or may be, handed to another node."""

    reason, code = "LEASE_LOST", "FAILED_PRECONDITION"


class ConflictError(StateError):
    """The same id already exists with other content."""

    reason, code = "CONFLICT", "ALREADY_EXISTS"


class VersionGapError(StateError):
    """Versions before this one are not announced here; metadata `newest_version` names the newest (-1: none)."""

    reason, code = "VERSION_GAP", "FAILED_PRECONDITION"


class PreconditionError(StateError):
    """The run, step or batch is not in a state that allows the call; read it again before deciding."""

    reason, code = "FAILED_PRECONDITION", "FAILED_PRECONDITION"


class IncompatibleError(StateError):
    """Schema versions differ between what is stored and what this release reads."""

    reason, code = "INCOMPATIBLE", "FAILED_PRECONDITION"


class UnauthenticatedError(AstraflowError):
    """The token is missing, expired or unknown."""

    reason, code = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionError_(AstraflowError):
    """The identity's role may not call this rpc."""

    reason, code = "PERMISSION_DENIED", "PERMISSION_DENIED"


class UnimplementedError(AstraflowError):
    """The contract names this capability, this release does not provide it."""

    reason, code = "UNIMPLEMENTED", "UNIMPLEMENTED"


class InternalError(AstraflowError):
    """A defect on the serving side; its log holds the cause under the same correlation id."""

    reason, code = "INTERNAL", "INTERNAL"


def _leaves(root: type[AstraflowError]) -> list[type[AstraflowError]]:
    found = [root] if "reason" in vars(root) else []
    for child in root.__subclasses__():
        found += _leaves(child)
    return found


ERRORS_BY_REASON: dict[str, type[AstraflowError]] = {error.reason: error for error in _leaves(AstraflowError)}

EVERY_RPC: tuple[str, ...] = (
    "INVALID_ARGUMENT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
)
"""Reasons that any rpc may answer; the contract's option `errors` lists those beyond them."""

"""Errors of the inference engine, one kind per thing the caller can do next.

Invariant: every message names what was wrong, its value, the limit and the remedy. The HTTP edge maps kinds
to status codes in one table (`server.py`) and never leaks a traceback; at start-up they become exit codes.

    AstraflowError
    ├── RetryableError  QueueFull (503), EngineUnavailable (503), RequestTimeout (504)
    ├── RequestError    InvalidRequest, CacheInUse, ModelError (400; at start-up: no start)
    └── InternalError   EngineFault (500)
"""

from astraflow.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    RequestError,
    ResourceExhaustedError,
    UnavailableError,
)


class InvalidRequest(InvalidArgumentError):
    """The request can never succeed as written."""


class CacheInUse(RequestError):
    """A flush was asked for while requests hold or wait for cached keys and values."""

    reason, code = "CACHE_IN_USE", "FAILED_PRECONDITION"


class ModelError(RequestError):
    """The model folder is missing, incomplete, of another shape, or holds numbers that cannot be served."""

    reason, code = "INVALID_MODEL", "FAILED_PRECONDITION"


class QueueFull(ResourceExhaustedError):
    """The engine holds as many requests as it may."""


class EngineUnavailable(UnavailableError):
    """The scheduler thread is stopping or has failed, so nothing will be generated."""


class RequestTimeout(DeadlineError):
    """The request did not finish within the server's deadline and was aborted."""


class EngineFault(InternalError):
    """The engine could not finish the request through its own or its weights' fault."""

"""Refusals of the endpoint in the shape that clients of the OpenAI API read.

Invariant: every refusal says what was wrong, its value, the limit and the remedy, and whether trying again can help; a
server's traceback never leaves it. Raised by all of this room; `app` answers with them.
"""

import re
from collections.abc import Mapping

from pydantic import ValidationError

from astraflow.errors import AstraflowError

_MAX_INPUT_CHARS = 80


class ApiError(Exception):
    """One refusal: its HTTP `status`, and what the error object says."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self._param = param
        self._kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    @property
    def body(self) -> Mapping[str, object]:
        """The JSON that the client gets."""
        error = {"message": str(self), "type": self._kind, "param": self._param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> Mapping[str, str]:
        """Asks clients not to repeat what will fail again: by default they repeat 409, 429 and 5xx."""
        return {"x-should-retry": "false"}


def unauthorised() -> ApiError:
    """A key that opens nothing: wrong, or of an episode that is over."""
    message = "this key opens no episode: keys are valid while their episode runs; use the OPENAI_API_KEY of this task"
    return ApiError(401, message, code="invalid_api_key", kind="authentication_error")


def over_limit(what: str, limit: int, *, remedy: str) -> ApiError:
    """The episode has used up something."""
    message = f"an episode may have {limit} {what}, this one would have more; {remedy}"
    return ApiError(429, message, code="insufficient_quota", kind="insufficient_quota")


def refused_call(error: AstraflowError) -> ApiError:
    """What the policy refused: a prompt that the engine does not take, messages that the template does not."""
    # Token ids and sampling are the node's own, so an engine that refuses a call refuses its length.
    too_long = error.reason == "ENGINE_REFUSED"
    return ApiError(400, error.message, code="context_length_exceeded" if too_long else "invalid_value")


def refused_body(error: ValidationError) -> ApiError:
    """The deepest thing that is wrong with a request's fields; of a field with two types the nearer one."""
    first = max(error.errors(include_url=False), key=lambda detail: len(detail["loc"]))
    # Between names and indexes stand the types that were tried.
    path = [str(part) for part in first["loc"] if not re.fullmatch(r"str|list\[.*", str(part))]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        message = f"unknown or unsupported field {param!r}; docs/agents.md lists what the endpoint takes"
        return ApiError(400, message, code="unknown_parameter", param=param)
    given = repr(first["input"])[:_MAX_INPUT_CHARS]
    return ApiError(
        400, f"{param or 'the body'}: {first['msg']} (got {given})", code="invalid_value", param=param
    )

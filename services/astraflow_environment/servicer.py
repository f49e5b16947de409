"""The rpcs of `EnvironmentService`: they check bounds and delegate to `sessions`."""

from google.protobuf.duration_pb2 import Duration

from astraflow._contract import bounds_of
from astraflow.errors import InvalidArgumentError
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow_environment.sessions import Sessions
from astraflow_kit.serve import Context

_DEFAULT_DEADLINE_S = 30.0
_MAX_DEADLINE_S = bounds_of(contract.StepRequest, "deadline_duration").max
_MAX_ID = 128
_MAX_HOLDER = bounds_of(contract.ResetRequest, "holder").max_len


class EnvironmentServicer(environment_service_pb2_grpc.EnvironmentServiceServicer):
    """Serves the sessions of one environment."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def Reset(self, request: contract.ResetRequest, context: Context) -> contract.ResetResponse:
        name = request.session_id
        if not (0 < len(name) <= _MAX_ID and name.isascii() and name.isprintable() and " " not in name):
            raise InvalidArgumentError(
                f"session_id {name[:_MAX_ID]!r}: expected 1–{_MAX_ID} printable ASCII characters without blanks"
            )
        if len(request.holder) > _MAX_HOLDER:
            raise InvalidArgumentError(f"holder has {len(request.holder)} characters, at most {_MAX_HOLDER}")
        return await self._sessions.reset(request, deadline_s=_deadline_s(request.deadline_duration))

    async def Step(self, request: contract.StepRequest, context: Context) -> contract.StepResponse:
        if request.turn < 1 or request.action.role != "assistant":
            raise InvalidArgumentError(
                f"turn {request.turn} with an action of role {request.action.role!r}: turns count from 1, and an "
                "action is an assistant's message"
            )
        return await self._sessions.step(request, deadline_s=_deadline_s(request.deadline_duration))

    async def Close(self, request: contract.CloseRequest, context: Context) -> contract.CloseResponse:
        return self._sessions.close(request.session_id)


def _deadline_s(duration: Duration) -> float:
    seconds = duration.ToTimedelta().total_seconds()
    if not 0 <= seconds <= _MAX_DEADLINE_S:
        raise InvalidArgumentError(f"deadline_duration {seconds:g} s: expected 0 to {_MAX_DEADLINE_S:g} s")
    return seconds or _DEFAULT_DEADLINE_S

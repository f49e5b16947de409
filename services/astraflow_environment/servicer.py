"""The rpcs of `EnvironmentService`: they check bounds and delegate to `sessions`."""

from google.protobuf.duration_pb2 import Duration

from astraflow.errors import InvalidArgumentError
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow_environment.sessions import Sessions
from astraflow_kit.serve import Context

_DEFAULT_DEADLINE_S = 30.0


class EnvironmentServicer(environment_service_pb2_grpc.EnvironmentServiceServicer):
    """Serves the sessions of one environment."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def Reset(self, request: contract.ResetRequest, context: Context) -> contract.ResetResponse:
        return await self._sessions.reset(request, deadline_s=_deadline_s(request.deadline_duration))

    async def Step(self, request: contract.StepRequest, context: Context) -> contract.StepResponse:
        if request.action.role != "assistant":
            raise InvalidArgumentError(
                f"action has role {request.action.role!r}; an action is an assistant's message"
            )
        return await self._sessions.step(request, deadline_s=_deadline_s(request.deadline_duration))

    async def Close(self, request: contract.CloseRequest, context: Context) -> contract.CloseResponse:
        return self._sessions.close(request.session_id)


def _deadline_s(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9 or _DEFAULT_DEADLINE_S

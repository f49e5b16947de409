"""A session of an environment that another process serves: `EnvironmentService` as an `Environment`.

Invariant: every call has a deadline; what is lost on the way is repeated under the same session and turn, so nothing
acts twice; an action whose outcome cannot be known any more ends as `EnvironmentFailed`. Made by `served`.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.duration_pb2 import Duration

from astraflow.chat import message_to_proto, observation_from_proto, task_to_proto
from astraflow.client import AsyncClient, RetryPolicy
from astraflow.environments import EnvironmentFailed
from astraflow.errors import (
    AstraflowError,
    DeadlineError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.raas.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from astraflow_kit import traces
from astraflow_kit.log import get_logger

if TYPE_CHECKING:
    import grpc.aio

log = get_logger(__name__)

PATIENCE = RetryPolicy(total_s=10.0, first_wait_s=0.1, max_wait_s=1.0)
"""How long a service that does not answer is called again: a restart, a lost connection."""
_LATE_S = 5.0
"""Beyond the deadline that the service keeps itself."""
_CLOSE_S = 5.0
_MAX_BUSY_S = 10.0
"""After which a service whose sessions are all taken is asked again, whatever it says."""
_MAX_DEADLINE_S = 600.0

Request = TypeVar("Request")
Response = TypeVar("Response")


def acted(name: str) -> traces.Attributes:
    """What the span of an action says, in the words of OpenTelemetry's conventions for generative AI."""
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}


class EnvironmentUnavailable(Exception):
    """The service cannot be reached: nothing has begun, and the task can be run later."""


class RemoteEnvironment:
    """One session; `reset` waits for a free one for as long as its caller does."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        name: str,
        turn_timeout_s: float,
        holder: str = "",
        incarnation: int = 0,
    ) -> None:
        self._client = client
        self._holder = holder
        self._incarnation = incarnation
        self._service = EnvironmentServiceStub(client.channel)
        self._name = name
        self._timeout_s = min(turn_timeout_s, _MAX_DEADLINE_S)
        self._session_id = secrets.token_urlsafe(24)
        self._turn = 0

    async def reset(self, task: TaskSpec) -> Observation:
        """Start a session. Raises EnvironmentUnavailable, MissingCapability, EnvironmentFailed."""
        request = contract.ResetRequest(
            session_id=self._session_id,
            environment=self._name,
            task=task_to_proto(task),
            deadline_duration=self._deadline(),
            holder=self._holder,
            holder_incarnation=self._incarnation,
        )
        try:
            answer = await self._when_free(lambda: self._call(self._service.Reset, request))
        except NotFoundError as error:
            raise MissingCapability(f"{self._where}: {error.message}") from error
        except (UnavailableError, DeadlineError) as error:
            if error.metadata.get("rpc") and isinstance(error, DeadlineError):
                raise self._failure(error) from error  # the service answers: its environment is late
            raise EnvironmentUnavailable(
                f"{self._where} does not answer ({error.message}); start it, or mend --environment of this node"
            ) from error
        except AstraflowError as error:
            raise self._failure(error) from error
        return self._seen(answer.observation, answer.tools)

    async def step(self, action: Message) -> Observation:
        """Act once. Raises EnvironmentFailed."""
        self._turn += 1
        request = contract.StepRequest(
            session_id=self._session_id,
            turn=self._turn,
            action=message_to_proto(action),
            deadline_duration=self._deadline(),
        )
        try:
            with traces.span(f"execute_tool {self._name}", acted(self._name)):
                answer = await self._call(self._service.Step, request)
        except AstraflowError as error:
            raise self._failure(error) from error
        return self._seen(answer.observation)

    def _seen(self, seen: contract.Observation, tools: Sequence[contract.Tool] = ()) -> Observation:
        """What the service shows, in the contract's bounds: a reward that is no number would cost this node, not it."""
        try:
            return observation_from_proto(seen, tools)
        except ValueError as error:
            raise EnvironmentFailed(f"{self._where}, turn {self._turn}: {error}") from error

    async def close(self) -> None:
        """End the session; one that cannot be reached ends by itself."""
        request = contract.CloseRequest(session_id=self._session_id)
        try:
            await self._client.call(
                self._service.Close, request, timeout_s=_CLOSE_S, retry=RetryPolicy(total_s=0.0)
            )
        except NotFoundError:
            return  # it never began, or ended with its service
        except AstraflowError as error:
            log.info("environment.not_closed", environment=self._name, why=error.message)

    async def _when_free(
        self, call: Callable[[], Awaitable[contract.ResetResponse]]
    ) -> contract.ResetResponse:
        while True:
            try:
                return await call()
            except ResourceExhaustedError as error:
                await asyncio.sleep(min(_MAX_BUSY_S, PATIENCE.wait_s(1, hint_s=error.retry_after_s)))

    async def _call(
        self, rpc: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]", request: Request
    ) -> Response:
        return await self._client.call(rpc, request, timeout_s=self._timeout_s + _LATE_S, retry=PATIENCE)

    def _deadline(self) -> Duration:
        deadline = Duration()
        deadline.FromMilliseconds(int(self._timeout_s * 1000))
        return deadline

    @property
    def _where(self) -> str:
        return f"environment {self._name} at {self._client.address}"

    def _failure(self, error: AstraflowError) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._where}, turn {self._turn}: {error.reason}: {error.message}")

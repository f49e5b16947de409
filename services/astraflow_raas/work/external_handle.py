"""The `Policy` that a workflow holds for a role whose policy is an external endpoint: text in, text out.

Invariant: nothing that it says is ever a trajectory, for the endpoint tells neither tokens nor log-probs that could be
trusted. Made by `session` for each episode.
"""

from collections.abc import Sequence
from typing import NoReturn

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import GenerateResult, Message, Tool
from astraflow.recipe import ResolvedRole
from astraflow.rollout.v1 import task_pb2
from astraflow_raas.agents.calls import TextOnly
from astraflow_raas.policies.external_model import ExternalModel


class ExternalHandle(TextOnly):
    """An external policy bound to one episode; only `chat` works."""

    waiting_for_engine = False

    def __init__(
        self, role: ResolvedRole, model: ExternalModel, *, sampling: task_pb2.SamplingParams
    ) -> None:
        self.name = role.policy_id
        self.role = role.name
        self.wants_trajectory = False
        self.max_new_tokens = sampling.max_new_tokens
        self.is_evaluation = False
        self._model = model
        self._sampling = sampling

    def encode(self, messages: Sequence[Message] | str, *, tools: Sequence[Tool] = ()) -> list[int]:
        self._refuse()

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        self._refuse()

    def decode(self, token_ids: Sequence[int]) -> str:
        self._refuse()

    def read(
        self, token_ids: Sequence[int], *, tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        self._refuse()

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        self._refuse()

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult:
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        return await self._model.chat(messages, sampling=self._sampling, max_new_tokens=limit)

    def demonstrate(self, text: str) -> GenerateResult:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidArgumentError(
            f"policy {self.name!r} is an external endpoint, which has no tokens here; ask it with `chat(messages)`"
        )

"""The Protocols that a recipe's plug-ins satisfy, and the plain values they exchange.

A plug-in is named `module.path:Name` in the recipe; `recipe:Name` means the recipe folder's own `recipe.py`.
Every plug-in is checked against its Protocol when a daemon starts. This module imports the standard library
only, so a recipe's rewards and workflows can be tested without any service installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from astraflow.plugin_state import (
    MeasuredStep,
    MeasuredTrajectory,
    Measuring,
    PluginState,
    TrajectorySummary,
)
from astraflow.rewards import MissingCapability, Reward, RewardFailed, RewardLimits, Score, Scorer

__all__ = [
    "Advantage",
    "Curator",
    "Dataset",
    "Demonstration",
    "Demonstrations",
    "Environment",
    "Episode",
    "Filter",
    "GenerateResult",
    "Group",
    "Loss",
    "MeasuredStep",
    "MeasuredTrajectory",
    "Measuring",
    "Message",
    "MissingCapability",
    "Observation",
    "PluginState",
    "Policy",
    "PolicyUnavailable",
    "ReadyGroup",
    "Reward",
    "RewardFailed",
    "RewardLimits",
    "RewardedRows",
    "Score",
    "Scorer",
    "Selector",
    "StepRequest",
    "TaskSpec",
    "Tool",
    "ToolCall",
    "TrainedTokens",
    "Trajectory",
    "TrajectoryBuilder",
    "TrajectorySummary",
    "TurnSpan",
    "VersionSpan",
    "Workflow",
]


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name` by an assistant; `arguments` is a JSON object as text, `id` names the call."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Tool:
    """A tool that an assistant may call; `parameters` is a JSON schema as text."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'

    def as_chat(self) -> dict[str, Any]:
        """Return the mapping that chat templates take."""
        schema = json.loads(self.parameters)
        described = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Message:
    """One chat message in the shape of the OpenAI API: `role` is `system`, `user`, `assistant` or `tool`.

    An assistant makes `tool_calls`; a tool answers `tool_call_id`. `name` tells apart who has the same role.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def as_chat(self) -> dict[str, Any]:
        """Return the mapping that chat templates take; arguments are decoded where they are JSON."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _decoded(call)}}
            for call in self.tool_calls
        ]
        optional = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content, **given}


def _decoded(call: ToolCall) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


@dataclass(frozen=True)
class TaskSpec:
    """One prompt, or environment start, as a dataset yields it.

    `task_id` is a pure function of the dataset's index, so that submitting twice is harmless; `data` is JSON of at most
    64 KiB, `source` the part of the data set. A higher `priority` (0 to 3) is leased first.
    """

    task_id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    priority: int = 0


@runtime_checkable
class Dataset(Protocol):
    """Random access to training and held-out tasks; called by the dataflow server. Deterministic in (seed, index).

    A class is made with `seed` and its settings. With `__len__`, training tasks end there and `train` is asked
    for smaller indexes only. An attribute `tasks_per_epoch` is how many go once through the problems.
    """

    def train(self, index: int) -> TaskSpec | None:
        """Return training task `index` (0, 1, 2, …), or None when the data set is exhausted."""

    def heldout(self, index: int) -> TaskSpec | None:
        """Return held-out task `index`, or None past the end. Never shares a problem with `train`."""


@dataclass(frozen=True)
class Demonstration:
    """One supervised example of the warm start; the loss covers `completion` only."""

    messages: tuple[Message, ...]
    completion: str


@runtime_checkable
class Demonstrations(Protocol):
    """An endless, seeded stream of supervised examples; called by the trainer's warm start."""

    def __call__(self, seed: int) -> Iterator[Demonstration]:
        """Return the stream for `seed`; equal seeds give equal streams."""


class PolicyUnavailable(Exception):
    """Raised by a policy's `generate` and `chat` when its engine is down and the run has other policies.

    A workflow that catches it may return what is complete without that policy; it is pushed and used. Otherwise the
    node gives the episode back, which costs no attempt.
    """


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sequence were sampled under weight `version`, swapped in before `start`; `recomputed`
    tells that the keys and values of what stands before were then computed anew."""

    start: int
    end: int
    version: int
    recomputed: bool = False

    def moved(self, by: int) -> VersionSpan:
        """The same span of a sequence with `by` more tokens before it."""
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True)
class TurnSpan:
    """Tokens [start, end) are one turn of the chat role `role`; `reward` is what the environment gave for it."""

    start: int
    end: int
    role: str
    reward: float = 0.0


@dataclass(frozen=True)
class GenerateResult:
    """What a policy sampled for one call: token ids, log-probs of exactly those, and the versions that made them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One policy's token sequence from one episode, exactly as sampled (never re-tokenised).

    `token_ids`, `loss_mask` and `logprobs` have equal length T; `logprobs[t]` is 0.0 where `loss_mask[t]` is
    False. `version_spans` cover every trainable position; `turn_spans` are ascending and may be empty.
    `TrajectoryBuilder` keeps all of them aligned.
    """

    policy: str
    """The policy that sampled it; `role` tells which of its roles, empty where it has one only."""
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    version_spans: Sequence[VersionSpan]
    reward: float
    role: str = ""
    finish_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_spans: Sequence[TurnSpan] = ()


@dataclass(frozen=True)
class Episode:
    """The outcome of one run of a workflow: 0..k trajectories per (policy, role), and named metrics."""

    trajectories: tuple[Trajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """A workflow's handle on the policy that plays one role, bound to the episode and its sampling parameters."""

    name: str
    """The policy. Two roles may have the same."""
    role: str
    """The role, for its trajectories."""
    wants_trajectory: bool
    """Whether a trajectory of this role counts in this episode. When it does not, because the role is not trained or
    its policy has groups enough for now, leave the trajectory out, and skip the calls that serve no other role.
    """
    max_new_tokens: int
    """The most tokens that one generation may have, by the recipe."""
    is_evaluation: bool
    """Whether the episode judges the policy, and nothing of it is trained on."""

    def encode(self, messages: Sequence[Message] | str, *, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the prompt's token ids, chat template applied, generation prompt added; those of a text as it is."""

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return `token_ids`, which end with an assistant's turn as it was sampled, followed by `messages` and the
        generation prompt.

        What was sampled is never tokenised again. Raises ValueError when the chat template writes a message
        differently depending on what stands before it; then a conversation needs a trajectory for each turn.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, special tokens removed."""

    def read(
        self, token_ids: Sequence[int], *, tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Return what sampled ids say: text and, with `tools`, the calls in the format of the chat template.

        A malformed call is left in the text. Ids of calls are derived from all token ids given.
        """

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        """Sample one continuation; may span a weight update. Raises PolicyUnavailable, or when cancelled or late."""

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult:
        """Sample the answer to `messages`: `generate` of what `encode` makes of them."""

    def demonstrate(self, text: str) -> GenerateResult:
        """Return `text` and the end of a turn as if it had just been sampled, with log-probs 0: for losses that look
        at no sampler, such as `sft`. Calls no engine; raises InvalidArgumentError in evaluations."""


class TrajectoryBuilder:
    """Builds one policy's trajectory turn by turn: token ids, loss mask, log-probs and spans stay aligned.

    `add_prompt` once, then `generate`, and between generations `add_messages`: what the environment, a tool or another
    policy says. Only what was sampled is trained on. Misuse raises ValueError.
    """

    def __init__(self, policy: Policy, *, tools: Sequence[Tool] = ()) -> None:
        self._policy, self._tools = policy, tuple(tools)
        self._token_ids: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._version_spans: list[VersionSpan] = []
        self._turn_spans: list[TurnSpan] = []
        self._finish_reason = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far; what the next generation continues."""
        return tuple(self._token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self._loss_mask)

    def add_prompt(self, messages: Sequence[Message]) -> None:
        """Begin with `messages`, which are not trained on."""
        if self._token_ids:
            raise ValueError("the prompt comes first, and once; add_messages adds what follows a generation")
        self._add_given(self._policy.encode(messages, tools=self._tools), messages)

    def add_messages(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> bool:
        """Add what follows a generation and is not trained on.

        Returns False, and adds nothing, when that would leave no room for a token below `max_tokens` in all.
        """
        if not self._finish_reason:
            raise ValueError("messages follow a generation; give all that stand before it to add_prompt")
        extended = self._policy.extend(self._token_ids, messages, tools=self._tools)
        if extended[: len(self._token_ids)] != self._token_ids:
            raise ValueError("the policy's extend changed tokens that were sampled; it may only append")
        if max_tokens is not None and len(extended) >= max_tokens:
            return False
        self._add_given(extended[len(self._token_ids) :], messages)
        return True

    def reward_turn(self, reward: float) -> None:
        """Note what the environment gave for the newest generation."""
        if not self._turn_spans or self._turn_spans[-1].role != "assistant":
            raise ValueError("a reward is for a generation; note it before more messages are added")
        self._turn_spans[-1] = replace(self._turn_spans[-1], reward=reward)

    async def generate(self, *, max_new_tokens: int | None = None) -> GenerateResult:
        """Sample a continuation of what is built, and add it."""
        prompt_ids = self.token_ids
        result = await self._policy.generate(prompt_ids, max_new_tokens=max_new_tokens)
        self.add_generation(result, prompt_ids=prompt_ids)
        return result

    def add_generation(self, result: GenerateResult, *, prompt_ids: Sequence[int]) -> None:
        """Add what the policy sampled for `prompt_ids`, which must be what is built so far."""
        start, num_new = len(self._token_ids), len(result.token_ids)
        if not start or tuple(prompt_ids) != self.token_ids:
            raise ValueError(
                f"the generation continues {len(prompt_ids)} tokens that are not the {start} built so far; "
                "begin another trajectory with its prompt"
            )
        if len(result.logprobs) != num_new:
            raise ValueError(f"the generation has {num_new} tokens and {len(result.logprobs)} log-probs")
        self._add(result.token_ids, result.logprobs, role="assistant", sampled=True)
        self._version_spans += [span.moved(start) for span in result.version_spans]
        self._finish_reason = result.finish_reason

    def build(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """Return the trajectory; it ended as its last generation did."""
        if not any(self._loss_mask):
            raise ValueError("nothing was sampled, so there is nothing to train on; leave the trajectory out")
        return Trajectory(
            policy=self._policy.name,
            token_ids=self.token_ids,
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            version_spans=tuple(self._version_spans),
            reward=reward,
            role=self._policy.role,
            finish_reason=self._finish_reason,
            metrics=dict(metrics or {}),
            turn_spans=tuple(self._turn_spans),
        )

    def _add_given(self, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        self._add(
            token_ids, [0.0] * len(token_ids), role=messages[-1].role if messages else "", sampled=False
        )

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, role: str, sampled: bool) -> None:
        start = len(self._token_ids)
        self._token_ids += token_ids
        self._loss_mask += [sampled] * len(token_ids)
        self._logprobs += logprobs
        if token_ids:
            self._turn_spans.append(TurnSpan(start, len(self._token_ids), role))


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment shows after a reset or an action. `reward` is that of the action; `done` tells that the
    episode is over, by success, failure or the environment's own limit. `tools` are named at the reset."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


@runtime_checkable
class Environment(Protocol):
    """What one episode acts in: in the node's event loop, or served by a process of its own."""

    async def reset(self, task: TaskSpec) -> Observation:
        """Start anew for `task`; deterministic in it. Returns what is seen first."""

    async def step(self, action: Message) -> Observation:
        """Do what an assistant's message says: its text, or its tool calls. Never called after `done`."""

    async def close(self) -> None:
        """Free what the episode held; called once, also after an error."""


@runtime_checkable
class Workflow(Protocol):
    """Runs one episode of a task against the run's policies; called by a RaaS node, many at a time in one
    event loop.

    An attribute or property `roles: Sequence[str]` may declare the roles that it plays. A node then refuses a recipe
    that leaves one out or names another.
    """

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the finished episode; `policies` are by role. Exceptions fail the lease with reason
        `workflow_error`."""


class _OfTrajectories:
    trajectories: tuple[TrajectorySummary, ...]

    @property
    def rewards(self) -> list[float]:
        """The rewards, in the order of `trajectories`."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that sampled a trainable token."""
        return min(trajectory.min_version for trajectory in self.trajectories)

    @property
    def newest_version(self) -> int:
        """Newest weight version that sampled a trainable token."""
        return max(trajectory.max_version for trajectory in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class Group(_OfTrajectories):
    """All trajectories of one task for one (policy, role), whole: at least one.

    `verdict` is empty while filters judge it, then `ready`, `filtered` or another reason why it was dropped
    (docs/dataflow.md lists them).
    """

    task: TaskSpec
    trajectories: tuple[TrajectorySummary, ...]
    policy: str = ""
    role: str = ""
    group_id: str = ""
    verdict: str = ""


@runtime_checkable
class Filter(Protocol):
    """Decides whether a complete group may be trained on; called by the dataflow server for each: must be fast."""

    def __call__(self, group: Group) -> bool:
        """Return True to keep the group. One that raises, or returns no bool, drops it as `filter_failed`."""


@runtime_checkable
class Curator(Protocol):
    """Decides before rollout which tasks are worth it; called by the dataflow server, in a thread.

    Deterministic given its state, for a call may be repeated when two servers share a run.
    """

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those of the drawn tasks to roll out, in order; the others are skipped for good."""

    def observe(self, group: Group) -> None:
        """Learn from a complete group, whatever its verdict."""


@dataclass(frozen=True, kw_only=True)
class ReadyGroup(_OfTrajectories):
    """One group that a batch may take. `arrival` counts the groups of the run in the order they became ready.

    Of its trajectories `finish_reason` and `metrics` are not kept.
    """

    group_id: str
    trajectories: tuple[TrajectorySummary, ...]
    arrival: int
    task_id: str = ""
    role: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What a step needs: `num_groups` groups, of staleness at most `max_staleness` against `base_version`."""

    policy: str
    step: int
    base_version: int
    num_groups: int
    max_staleness: int
    num_outstanding: int
    """Groups that nodes still work on; 0 means that no others will come before this step is trained."""


@runtime_checkable
class Selector(Protocol):
    """Chooses the groups of a batch; called by the dataflow server, in a thread, once per step.

    Without one, groups whose staleness deadline is nearest go first.
    """

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return the ids of `request.num_groups` candidates in the order of the batch, or none to wait for others.

        `candidates` are at least that many and come oldest first. It is asked again when more are ready.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedTokens:
    """N trained tokens of a step: whole rows, but any part of the step's. Every array is a torch tensor on one device.

    A row is the trained part of one trajectory; `row` counts from 0 over this trainer process's rows of the step.
    """

    logprob: Any
    """float32[N], with gradient: log-probs under the weights being trained."""
    anchor_logprob: Any
    """float32[N]: what ratios are taken to: the sampler's, or with a proximal anchor those at the step's start."""
    behavior_logprob: Any
    """float32[N]: the sampler's log-probs."""
    advantage: Any
    """float32[N], the same for all tokens of a row."""
    row: Any
    """int64[N]: the row of each token, below `num_rows`."""
    num_rows: int


@runtime_checkable
class Loss(Protocol):
    """The loss of each trained token; called by the trainer, once per micro-batch.

    The trainer weighs and adds what it returns, adds a KL term, and averages over ranks. So that the loss of a step
    does not depend on micro-batches, packing or the number of ranks, a token's loss may depend on the tokens of its own
    row only: no mean over N, no random numbers, no state. Gradients flow through `tokens.logprob`.
    """

    def __call__(self, tokens: TrainedTokens) -> Any:  # noqa: ANN401 - torch is no dependency of this package
        """Return float32[N]: the loss of each token, before aggregation.

        An exception, another shape or a loss without gradient fails the step, with the plug-in's name; a batch whose
        step fails twice alike is quarantined. Values that are not finite skip the step.
        """


@dataclass(frozen=True, kw_only=True)
class RewardedRows:
    """All N rows of a batch that have this advantage, those of every rank, in an order that means nothing."""

    rewards: Sequence[float]
    groups: Sequence[int]
    """Rows of one task, policy and role have the same number; a group is always whole."""
    lengths: Sequence[int]
    """Trained tokens of each row."""


@runtime_checkable
class Advantage(Protocol):
    """Turns the rewards of a batch into advantages; called by every rank of the trainer, once per step.

    Each rank computes the same numbers: they may depend on the arguments only, and on the order of rows not at all.
    """

    def __call__(self, rows: RewardedRows) -> Sequence[float]:
        """Return one finite number per row. Rows of exactly 0 are left out of the step unless the recipe says
        otherwise (`drop_zero_advantage`). Anything else fails the step, with the plug-in's name."""

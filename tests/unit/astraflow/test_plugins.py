"""What a recipe's own plug-ins can rely on: plain Python, checkable at start, values that do not change."""

import asyncio
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow import plugin_state, plugins, rewards, trajectories

HERE = {plugins.__name__, plugin_state.__name__, rewards.__name__}
OWN = {name: kind for name, kind in vars(plugins).items() if getattr(kind, "__module__", "") in HERE}
PROTOCOLS = {name: kind for name, kind in OWN.items() if getattr(kind, "_is_protocol", False)}
VALUES: dict[str, Any] = dict(inspect.getmembers(plugins, dataclasses.is_dataclass))
ERRORS = {name for name, kind in OWN.items() if isinstance(kind, type) and issubclass(kind, Exception)}


def test_every_public_name_is_a_protocol_a_value_an_error_the_state_or_the_builder() -> None:
    others = ["PluginState", "TrajectoryBuilder"]
    assert sorted(plugins.__all__) == sorted([*PROTOCOLS, *VALUES, *ERRORS, *others])


def test_importing_the_protocols_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import astraflow.plugins; "
        "added = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(added - set(sys.stdlib_module_names)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "['astraflow']"


@pytest.mark.parametrize("name", sorted(set(PROTOCOLS) - {"Policy", "Scorer"}))
def test_a_recipe_can_be_checked_against_every_plugin_protocol(name: str) -> None:
    class Nothing:
        pass

    assert not isinstance(Nothing(), PROTOCOLS[name])


@pytest.mark.parametrize("name", sorted(VALUES))
def test_values_cannot_be_changed_by_whoever_gets_them(name: str) -> None:
    assert VALUES[name].__dataclass_params__.frozen


def test_a_plain_class_and_a_plain_function_are_plugins() -> None:
    class Tasks:
        def train(self, index: int) -> plugins.TaskSpec | None:
            return None

        def heldout(self, index: int) -> plugins.TaskSpec | None:
            return None

    def keep(group: plugins.Group) -> bool:
        return True

    assert isinstance(Tasks(), plugins.Dataset)
    assert isinstance(keep, plugins.Filter)


def test_a_message_becomes_what_chat_templates_take() -> None:
    assert plugins.Message("user", "hi").as_chat() == {"role": "user", "content": "hi"}
    calls = (plugins.ToolCall("c1", "add", '{"a": 1}'), plugins.ToolCall("c2", "say", "not json"))
    assert plugins.Message("assistant", "", tool_calls=calls).as_chat()["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "say", "arguments": "not json"}},
    ]
    answer = plugins.Message("tool", "2", tool_call_id="c1", name="add")
    assert answer.as_chat() == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6)
"""Of each turn: sampled tokens, of how many under a newer version, tokens of the messages after it."""


@given(prompt=st.integers(1, 6), turns=STEPS)
def test_whatever_a_workflow_adds_the_columns_stay_aligned_and_pass_the_checker(
    prompt: int, turns: list[tuple[int, int, int]]
) -> None:
    policy = ScriptedPolicy(sampled=[(num, newer) for num, newer, _ in turns])
    builder = plugins.TrajectoryBuilder(policy)
    builder.add_prompt([plugins.Message("user", "x" * prompt)])
    for _, _, observed in turns:
        asyncio.run(builder.generate())
        builder.add_messages([plugins.Message("tool", "x" * observed)])
    if not any(num for num, _, _ in turns):
        with pytest.raises(ValueError, match="nothing was sampled"):
            builder.build(reward=1.0)
        return
    built = builder.build(reward=1.0, metrics={"turns": 2})
    kinds = {"token_ids": np.int64, "loss_mask": bool, "logprobs": np.float32}
    columns = {name: np.asarray(getattr(built, name), dtype=kind) for name, kind in kinds.items()}
    trained = trajectories.check_columns("trajectory", **columns, version_spans=built.version_spans)
    trajectories.check_spans("trajectory", built.turn_spans, num_tokens=len(built.token_ids), what="turn")
    assert trained.num_tokens == builder.num_sampled == sum(num for num, _, _ in turns)
    for token, sampled, logprob in zip(built.token_ids, built.loss_mask, built.logprobs, strict=True):
        assert (sampled, logprob) == ((True, -float(token)) if token >= SAMPLED else (False, 0.0))
    for span in built.version_spans:
        tokens = built.token_ids[span.start : span.end]
        assert {policy.version_of[token] for token in tokens} == {span.version}
    roles = [span.role for span in built.turn_spans for _ in range(span.start, span.end)]
    assert [role == "assistant" for role in roles] == list(built.loss_mask)
    assert (built.role, built.finish_reason, built.metrics) == ("player", "stop", {"turns": 2})


def test_a_builder_that_is_misused_says_how() -> None:
    result = plugins.GenerateResult((SAMPLED,), (-1.0,), (), "a", "stop")
    messages = [plugins.Message("user", "xx")]
    builder = plugins.TrajectoryBuilder(ScriptedPolicy(sampled=[]))
    with pytest.raises(ValueError, match="follow a generation"):
        builder.add_messages(messages)
    with pytest.raises(ValueError, match="not the 0 built so far"):
        builder.add_generation(result, prompt_ids=())
    builder.add_prompt(messages)
    with pytest.raises(ValueError, match="first, and once"):
        builder.add_prompt(messages)
    with pytest.raises(ValueError, match="continues 1 tokens that are not the 2 built so far"):
        builder.add_generation(result, prompt_ids=(1,))
    with pytest.raises(ValueError, match="1 tokens and 0 log-probs"):
        builder.add_generation(replace(result, logprobs=()), prompt_ids=builder.token_ids)
    assert builder.token_ids == (1, 1)


SAMPLED = 100


class ScriptedPolicy:
    """One token for each character of a message; samples new tokens, as many as the script says."""

    name, role, wants_trajectory = "solver", "player", True

    def __init__(self, *, sampled: list[tuple[int, int]]) -> None:
        self.script, self.version_of = sampled, dict[int, int]()

    def encode(self, messages: Sequence[plugins.Message], **_tools: object) -> list[int]:
        return [1 for message in messages for _ in message.content]

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[plugins.Message], **_tools: object
    ) -> list[int]:
        return [*token_ids, *self.encode(messages)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> plugins.GenerateResult:
        num, newer = self.script.pop(0)
        first = SAMPLED + len(self.version_of)
        tokens = tuple(range(first, first + num))
        old = max(0, num - newer)
        cuts = [(0, old, 3), (old, num, 4)]
        spans = tuple(plugins.VersionSpan(*cut) for cut in cuts if cut[0] < cut[1])
        for span in spans:
            self.version_of |= dict.fromkeys(tokens[span.start : span.end], span.version)
        logprobs = tuple(-float(token) for token in tokens)
        return plugins.GenerateResult(tokens, logprobs, spans, "", "stop")


@pytest.mark.parametrize("reason", ["", "Bad data", "bad-data", "x" * 65, "a\n"])
def test_a_reward_fails_for_a_reason_that_is_a_slug(reason: str) -> None:
    assert plugins.RewardFailed("no answer", reason="no_answer_9").reason == "no_answer_9"
    with pytest.raises(ValueError, match="'no answer' must be 1 to 64 characters of a-z, 0-9 and _"):
        plugins.RewardFailed("no answer", reason=reason)

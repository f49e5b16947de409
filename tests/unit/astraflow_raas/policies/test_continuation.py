"""A conversation goes on token by token: what was sampled stays, and the template adds what follows."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import InvalidArgumentError, RecipeError
from astraflow.plugins import Message, Tool
from astraflow_raas.policies.tokenizer import load_tokenizer
from astraflow_raas.work.policy_handle import PolicyHandle
from support.raas_parts import CHAT_TEMPLATE, SOLVER, leased, write_tokenizer

END_OF_TURN = 2
STABLE = {
    "chatml": CHAT_TEMPLATE,
    # As reasoning models do: thoughts are shown for the last answer only, and tool results share a user turn.
    "thoughts_of_the_last_answer": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<tool>{{ m.content }}</tool>"
        "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "no_system": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
    ),
    "no_end_of_turn": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}
UNSTABLE = {
    "turns are numbered": (
        "{% for m in messages %}{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}",
        "differently after different conversations",
    ),
    "the system message stands in the last question": (
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        "differently after different conversations",
    ),
    "tools are listed in front": (
        "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}",
        "role 'tool' changes what stands before it",
    ),
    "answers are left out": (
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
        "does not write an assistant's message once",
    ),
}


HandleOf = Callable[[str], PolicyHandle]


@pytest.fixture(scope="module")
def handle_of(tmp_path_factory: pytest.TempPathFactory) -> HandleOf:
    @functools.cache
    def make(template: str) -> PolicyHandle:
        folder = write_tokenizer(tmp_path_factory.mktemp("model"))
        (folder / "chat_template.jinja").write_text(template)
        sampler: Any = SimpleNamespace(tokenizer=load_tokenizer(folder), experts=None)
        call = {"lease": leased(), "batch_key": lambda _: 0}
        return PolicyHandle(SOLVER, sampler=sampler, member=0, episode_id="e", **call)

    return make


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
QUESTIONS = st.builds(Message, st.just("user"), TEXTS)
TOOL_RESULTS = st.builds(Message, st.just("tool"), TEXTS, tool_call_id=st.just("c1"), name=st.just("add"))
FOLLOWING = st.lists(QUESTIONS | TOOL_RESULTS, min_size=1, max_size=3)


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=25)
@given(sampled=st.lists(st.integers(0, 300), min_size=1, max_size=12), following=FOLLOWING)
def test_what_was_sampled_is_kept_whatever_follows(
    handle_of: HandleOf, name: str, sampled: list[int], following: list[Message]
) -> None:
    handle = handle_of(STABLE[name])
    extended = handle.extend(sampled, following)
    assert extended[: len(sampled)] == sampled
    # The same follows any other turn.
    assert extended[len(sampled) :][-3:] == handle.extend([5, 6, 7], following)[-3:]


@pytest.mark.parametrize("name", sorted(set(STABLE) - {"no_end_of_turn"}))
@pytest.mark.parametrize("is_ended", [True, False])
@pytest.mark.parametrize("tools", [(), (Tool("add"), Tool("mul", "Multiply."))])
def test_a_conversation_that_was_extended_is_the_one_the_template_writes(
    handle_of: HandleOf, name: str, is_ended: bool, tools: tuple[Tool, ...]
) -> None:
    handle = handle_of(STABLE[name])
    chat = [Message("user", "What is 3 + 4?")]
    following = [Message("tool", "7", tool_call_id="c1"), Message("tool", "8"), Message("user", "Sure?")]
    whole = handle.encode([*chat, Message("assistant", "7 or so"), *following], tools=tools)
    num_sampled = whole.index(END_OF_TURN, len(handle.encode(chat, tools=tools))) + is_ended
    assert handle.extend(whole[:num_sampled], following, tools=tools) == whole


@pytest.mark.parametrize("name", UNSTABLE)
def test_a_template_that_does_more_than_append_is_refused(handle_of: HandleOf, name: str) -> None:
    template, complaint = UNSTABLE[name]
    with pytest.raises(RecipeError, match=f"cannot continue a conversation token by token: .*{complaint}"):
        handle_of(template).extend([1, 2], [Message("tool", "7")])


def test_extending_nothing_or_by_nothing_is_refused(handle_of: HandleOf) -> None:
    for token_ids, messages in (([], [Message("user", "x")]), ([1], [])):
        with pytest.raises(InvalidArgumentError, match="extend needs"):
            handle_of(CHAT_TEMPLATE).extend(token_ids, messages)

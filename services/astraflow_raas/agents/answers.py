"""Answers in the shapes of the OpenAI API: whole, or as server-sent events.

Invariant: a streamed answer holds what the whole one holds, and both say the same of tokens and reasons. Pure; called
by `app`.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from astraflow.plugins import Policy
from astraflow_raas.agents.calls import Answers, Choice
from astraflow_raas.agents.requests import ChatRequest, TextRequest

Json: TypeAlias = Mapping[str, Any]


def chat_completion(request: ChatRequest, answers: Answers, policy: Policy) -> Json:
    """The body of a chat completion."""
    choices = [
        {
            "index": index,
            "message": _message(choice),
            "logprobs": _logprobs(choice, policy) if request.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answers.choices)
    ]
    return {**_head("chat.completion", answers), "choices": choices, "usage": usage(answers)}


def chat_events(request: ChatRequest, answers: Answers, policy: Policy) -> Iterator[str]:
    """The same as events: for each choice its role and content, then its reason; then the usage if asked for."""
    head = _head("chat.completion.chunk", answers)
    for index, choice in enumerate(answers.choices):
        logprobs = _logprobs(choice, policy) if request.logprobs else None
        calls = [{"index": number, **call} for number, call in enumerate(_calls(choice))]
        delta = _message(choice) | ({"tool_calls": calls} if calls else {})
        first = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
        yield from (_event({**head, "choices": [part]}) for part in (first, last))
    if request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(answers)})
    yield "data: [DONE]\n\n"


def text_completion(request: TextRequest, answers: Answers, policy: Policy) -> Json:
    """The body of a completion of a text."""
    return {**_text_choices(request, answers, policy), "usage": usage(answers)}


def text_events(request: TextRequest, answers: Answers, policy: Policy) -> Iterator[str]:
    """The same as events."""
    body = _text_choices(request, answers, policy)
    yield _event(body)
    if request.stream_options.include_usage:
        yield _event({**body, "choices": [], "usage": usage(answers)})
    yield "data: [DONE]\n\n"


def _text_choices(request: TextRequest, answers: Answers, policy: Policy) -> Json:
    choices = []
    for index, choice in enumerate(answers.choices):
        result = choice.result
        logprobs = None
        if request.logprobs is not None:
            tokens = [policy.decode((token,)) for token in result.token_ids]
            logprobs = {"tokens": tokens, "token_logprobs": result.logprobs}
        said = {"text": result.text, "finish_reason": result.finish_reason, "logprobs": logprobs}
        choices.append({"index": index, **said})
    return {**_head("text_completion", answers), "choices": choices}


def models(names: Iterable[str]) -> Json:
    """The body of the list of models."""
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "astraflow"} for name in names]
    return {"object": "list", "data": listed}


def usage(answers: Answers) -> Json:
    """Tokens of the prompt, which the choices share, and of all choices."""
    sampled = sum(len(choice.result.token_ids) for choice in answers.choices)
    prompt = answers.num_prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str, answers: Answers) -> Json:
    return {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": answers.model,
    }


def _message(choice: Choice) -> dict[str, Any]:
    calls = _calls(choice)
    content = choice.message.content or (None if calls else "")
    return {"role": "assistant", "content": content, "refusal": None} | (
        {"tool_calls": calls} if calls else {}
    )


def _calls(choice: Choice) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.message.tool_calls
    ]


def _logprobs(choice: Choice, policy: Policy) -> Json:
    result = choice.result
    return {
        "content": [
            _token(policy.decode((token,)), logprob)
            for token, logprob in zip(result.token_ids, result.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _event(body: Json) -> str:
    return f"data: {json.dumps(body)}\n\n"

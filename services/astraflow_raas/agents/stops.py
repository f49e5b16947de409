"""Sampling that ends at a text.

Invariant: what is returned is what was sampled up to the token that completes the text, so it stays exact: where a
sample ends depends on its own tokens only. Engines here stop at token ids; a text is looked for between slices of the
answer. Called by `calls`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from astraflow.plugins import GenerateResult, Policy

_SLICE_TOKENS = 64
"""Tokens between two looks. Fewer sample less in vain, more cost fewer calls; the engine keeps the prefix."""


async def sample(
    policy: Policy, prompt_ids: Sequence[int], *, max_new_tokens: int, stops: Sequence[str]
) -> GenerateResult:
    """Sample until one of `stops`, which `text` leaves out, or the policy's own end. Raises what `generate` raises."""
    if not stops:
        return await policy.generate(prompt_ids, max_new_tokens=max_new_tokens)
    result: GenerateResult | None = None
    while True:
        done = result.token_ids if result else ()
        size = min(_SLICE_TOKENS, max_new_tokens - len(done))
        part = await policy.generate([*prompt_ids, *done], max_new_tokens=size)
        result = _joined(result, part, policy) if result else part
        if any(stop in result.text for stop in stops):
            return _cut(result, policy, stops)
        if part.finish_reason != "length" or len(result.token_ids) >= max_new_tokens:
            return result


def _joined(before: GenerateResult, part: GenerateResult, policy: Policy) -> GenerateResult:
    start, token_ids = len(before.token_ids), before.token_ids + part.token_ids
    shifted = [span.moved(start) for span in part.version_spans]
    return GenerateResult(
        token_ids=token_ids,
        logprobs=before.logprobs + part.logprobs,
        version_spans=(*before.version_spans, *shifted),
        text=policy.decode(token_ids),
        finish_reason=part.finish_reason,
    )


def _cut(result: GenerateResult, policy: Policy, stops: Sequence[str]) -> GenerateResult:
    """The shortest beginning of `result` that holds a stop."""

    def is_complete(length: int) -> bool:
        text = policy.decode(result.token_ids[:length])
        return any(stop in text for stop in stops)

    length = bisect_left(range(len(result.token_ids)), True, key=is_complete)
    text = policy.decode(result.token_ids[:length])
    spans = tuple(
        replace(span, end=min(span.end, length)) for span in result.version_spans if span.start < length
    )
    return GenerateResult(
        token_ids=result.token_ids[:length],
        logprobs=result.logprobs[:length],
        version_spans=spans,
        text=text[: min(text.index(stop) for stop in stops if stop in text)],
        finish_reason="stop",
    )

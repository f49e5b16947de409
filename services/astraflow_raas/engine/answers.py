"""The bodies and answers of /generate, in SGLang's words.

Invariant: an answer that leaves this module is of the call it stands for: its id, no more tokens than asked for, one
finite log-prob each, version spans that cover them and name only versions that the engine served meanwhile, and experts
of every token that a layer has seen where the call asked for them. Pure; called by `http`.
"""

import math
from base64 import b64decode
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from astraflow.plugins import VersionSpan
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import ABORTED, EngineFaulty, GenerateCall, Generation
from astraflow_raas.engine.transport import brief

log = get_logger(__name__)

_FINISH_REASONS = ("stop", "length", ABORTED)
# Rounding of log_softmax may leave a certain token an ulp above zero; anything more is a fault.
_LOGPROB_ROUNDING = 1e-4


def generate_body(calls: Sequence[GenerateCall], *, cache_key: str, adapter: str = "") -> dict[str, object]:
    """The body of one request for all `calls`, under an adapter if one is named; prefixes are shared only below the
    same `cache_key`.
    """
    named: dict[str, object] = {"lora_path": [adapter] * len(calls)} if adapter else {}
    # One switch for the whole request; what a call did not ask for is not read.
    recorded = {"return_routed_experts": True} if any(call.records_experts for call in calls) else {}
    return {
        **named,
        **recorded,
        "rid": [call.rid for call in calls],
        "input_ids": [call.prompt_ids for call in calls],
        "sampling_params": [_sampling_params(call) for call in calls],
        "return_logprob": True,
        "extra_key": cache_key,
        "stream": False,
    }


def read_answers(
    calls: Sequence[GenerateCall],
    answers: object,
    *,
    sent_under: int | None,
    served: int | None,
    recomputed: Container[int] = (),
) -> list[Generation]:
    """Check the answers to `calls`, which were sent under one version and read under another (None: not known).

    `recomputed` are versions at whose swap the keys and values of running calls were computed anew; spans say so.
    Raises EngineFaulty naming the call.
    """
    if not isinstance(answers, list) or len(answers) != len(calls):
        raise EngineFaulty(f"the engine answered {len(calls)} calls with {brief(answers)}")
    generations = (
        _generation(call, answer, sent_under=sent_under, served=served)
        for call, answer in zip(calls, answers, strict=True)
    )
    return [_with_recomputed(generation, recomputed) for generation in generations]


def _with_recomputed(generation: Generation, recomputed: Container[int]) -> Generation:
    """What follows the first span was sampled after a swap in the middle of the call."""
    if len(generation.spans) < 2:
        return generation
    first, *later = generation.spans
    marked = (replace(span, recomputed=span.version in recomputed) for span in later)
    return replace(generation, spans=(first, *marked))


def is_version_number(version: object) -> TypeGuard[str]:
    """Whether an engine's name of a version is one that a node gave it."""
    return isinstance(version, str) and version.isascii() and version.isdigit()


def _sampling_params(call: GenerateCall) -> dict[str, object]:
    return {
        "max_new_tokens": call.max_new_tokens,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k or -1,
        "sampling_seed": call.seed,
        "stop_token_ids": call.stop_token_ids,
    }


def _generation(
    call: GenerateCall, answer: Mapping[str, Any], *, sent_under: int | None, served: int | None
) -> Generation:
    try:
        generation = _read(call, answer)
        _check_versions(generation.spans, sent_under=sent_under, served=served)
        starts_late = generation.spans and sent_under not in (None, generation.spans[0].version)
        if starts_late and answer["meta_info"].get("cached_tokens"):
            # It waited inside the engine over a swap and then took prefixes of the older weights, under whose key it
            # was sent; its log-probs would be those of no version.
            log.info("engine.stale_prefix", rid=call.rid, sent_under=sent_under)
            return replace(generation, finish_reason=ABORTED)
        return generation
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        complaint = f"{type(error).__name__}: {error}"
        raise EngineFaulty(f"the engine's answer to call {call.rid} is unusable: {complaint}") from error


def _read(call: GenerateCall, answer: Any) -> Generation:  # noqa: ANN401 - JSON; every wrong shape raises
    meta = answer["meta_info"]
    if meta["id"] != call.rid:
        raise ValueError(f"it is the answer to call {brief(meta['id'])}")
    finish = meta["finish_reason"]
    if finish["type"] not in _FINISH_REASONS:
        raise ValueError(
            f"finish reason {brief(finish['type'])}, expected one of {', '.join(_FINISH_REASONS)}"
        )
    if finish["type"] == ABORTED and finish.get("message"):
        log.info("engine.aborted_call", rid=call.rid, message=brief(finish["message"]))
    token_ids = tuple(answer["output_ids"])
    least = 0 if finish["type"] == ABORTED else 1
    if not least <= len(token_ids) <= call.max_new_tokens:
        raise ValueError(f"{len(token_ids)} tokens, asked for {least} to {call.max_new_tokens}")
    return Generation(
        token_ids=token_ids,
        logprobs=_logprobs(meta, token_ids),
        spans=_spans(meta, num_tokens=len(token_ids)),
        finish_reason=str(finish["type"]),
        experts=_experts(call, meta, num_tokens=len(token_ids)),
    )


def _experts(call: GenerateCall, meta: Mapping[str, Any], *, num_tokens: int) -> bytes:
    if not call.records_experts or not num_tokens:
        return b""
    if meta.get("routed_experts") is None:
        raise ValueError("it does not say which experts its tokens went to (meta_info.routed_experts)")
    experts, num_rows = (
        b64decode(meta["routed_experts"], validate=True),
        len(call.prompt_ids) + num_tokens - 1,
    )
    if not experts or len(experts) % (4 * num_rows):
        raise ValueError(
            f"its routed experts have {len(experts)} bytes, no multiple of {num_rows} tokens of int32"
        )
    return experts


def _logprobs(meta: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    pairs = meta["output_token_logprobs"] if token_ids else []
    logprobs = tuple([_logprob(pair[0]) for pair in pairs])
    if len(logprobs) != len(token_ids) or any(
        pair[1] != token for pair, token in zip(pairs, token_ids, strict=True)
    ):
        raise ValueError(f"{len(logprobs)} log-probs do not belong to the {len(token_ids)} output tokens")
    return logprobs


def _logprob(value: float) -> float:
    if not math.isfinite(value) or value > _LOGPROB_ROUNDING:
        raise ValueError(f"log-prob {value!r} is not a finite number ≤ 0")
    return min(value, 0.0)


def _spans(meta: Mapping[str, Any], *, num_tokens: int) -> tuple[VersionSpan, ...]:
    if not num_tokens:
        return ()
    # SGLang omits the list only in answers that never saw an update; then one version made all tokens.
    listed = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    ]
    spans = tuple(
        VersionSpan(span["start"], span["end"], _version_number(span["version"])) for span in listed
    )
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != num_tokens or any(
        span.start != end or span.end <= end for span, end in zip(spans, ends, strict=False)
    ):
        raise ValueError(f"weight version spans {spans} do not cover {num_tokens} tokens")
    return spans


def _check_versions(spans: Sequence[VersionSpan], *, sent_under: int | None, served: int | None) -> None:
    versions = [span.version for span in spans]
    if versions != sorted(versions):
        raise ValueError(f"weight versions {versions} go back")
    low = versions[0] if sent_under is None or not versions else sent_under
    high = versions[-1] if served is None or not versions else served
    if versions and not low <= versions[0] <= versions[-1] <= high:
        raise ValueError(f"weight versions {versions}, but the engine served {low} to {high} meanwhile")


def _version_number(version: object) -> int:
    if not is_version_number(version):
        raise ValueError(f"weight version {version!r} is not a number, so this node did not load it")
    return int(version)

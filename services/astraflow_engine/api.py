"""The JSON of the HTTP API: SGLang's request bodies into checked values, completions into SGLang's answers.

Invariant: a body that passes is fully within this engine's limits, and a field that this engine cannot
honour is refused instead of ignored; answers carry SGLang's member names with SGLang's meanings. Called by
`server.py`; `docs/engine.md` lists the subset and every deviation.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from astraflow_engine import fields
from astraflow_engine.errors import InvalidRequest
from astraflow_engine.requests import (
    Completion,
    Finish,
    FinishKind,
    GenerateRequest,
    PauseMode,
    SamplingParams,
)

_DEFAULT_NEW_TOKENS = 128
# SGLang treats smaller temperatures as greedy.
_GREEDY_BELOW = 1e-6
_MAX_SEED = 2**63 - 1
_MAX_SAMPLES = 1024

_GENERATE_FIELDS = frozenset(
    ["rid", "input_ids", "sampling_params", "return_logprob", "extra_key", "cache_salt", "lora_path"]
)
# What a value of these would ask for cannot be done here.
_GENERATE_NEUTRAL: dict[str, object] = {
    "stream": False,
    "text": None,
    "input_embeds": None,
    "image_data": None,
    "video_data": None,
    "audio_data": None,
    "session_params": None,
    "custom_logit_processor": None,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "return_text_in_logprobs": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_sampling_mask": False,
    "return_entropy": False,
    "return_prompt_token_ids": False,
}
# These change no token and no answer.
_GENERATE_IGNORED = frozenset(
    ["log_metrics", "no_logs", "priority", "routing_key", "session_id", "conversation_id", "custom_labels"]
)
_SAMPLING_FIELDS = frozenset(
    [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "sampling_seed",
    ]
)
_SAMPLING_NEUTRAL: dict[str, object] = {
    "stop": None,
    "stop_regex": None,
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "beam_width": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "custom_params": None,
}
_SAMPLING_IGNORED = frozenset(
    ["skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"]
)
_UPDATE_FIELDS = frozenset(["model_path", "weight_version", "flush_cache", "abort_all_requests", "prepared"])
_UPDATE_NEUTRAL: dict[str, object] = {"is_async": False, "keep_pause": False, "manifest": None}
_UPDATE_IGNORED = frozenset(["load_format", "torch_empty_cache", "recapture_cuda_graph", "token_step"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Bounds of the served model that requests are checked against."""

    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBatch:
    """The sequences of one /generate call, prompt by prompt. `single` answers with an object, not a list."""

    requests: tuple[GenerateRequest, ...]
    return_logprob: tuple[bool, ...]
    single: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """An /update_weights_from_disk or /prepare_weights call."""

    model_path: Path
    weight_version: str
    flush_cache: bool
    abort_all_requests: bool
    prepared: bool
    """Swap in what was prepared under this path and version, if anything was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """A /load_lora_adapter call."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """An /abort_request call: everything, or the request(s) a client knows as `rid`."""

    rid: str
    abort_all: bool

    def matches(self, request: GenerateRequest) -> bool:
        """Whether `request` is meant."""
        return self.abort_all or request.rid == self.rid or request.batch_rid == self.rid


def parse_generate(body: object, *, limits: ModelLimits, new_rid: Callable[[], str]) -> GenerateBatch:
    """Check a /generate body. Raises InvalidRequest."""
    given = fields.json_object(body, name="the request body")
    if "text" in given or "input_ids" not in given:
        raise InvalidRequest(
            "input_ids is missing; this engine has no tokenizer, send the prompt's token ids as input_ids"
        )
    known = _GENERATE_FIELDS | _GENERATE_NEUTRAL.keys() | _GENERATE_IGNORED
    fields.refuse_unknown(given, known, where="the request body")
    fields.refuse_other_than(given, _GENERATE_NEUTRAL, where="request")
    prompts, single = _prompts(given["input_ids"], limits=limits)
    sampling = [_sampling_fields(value) for value in _spread(given, "sampling_params", len(prompts), {})]
    num_samples = _num_samples(sampling)
    return_logprob = _spread(given, "return_logprob", len(prompts), False)
    rids = _rids(
        given.get("rid"), num_prompts=len(prompts), num_samples=num_samples, single=single, new_rid=new_rid
    )
    spaces = _cache_spaces(given, num_prompts=len(prompts))
    adapters = _spread(given, "lora_path", len(prompts), "")
    requests = []
    for index, prompt in enumerate(prompts):
        params = _sampling_params(sampling[index], prompt=prompt, limits=limits)
        for sample in range(num_samples):
            batch_rid, rid = rids[index * num_samples + sample]
            requests.append(
                GenerateRequest(
                    rid=rid, batch_rid=batch_rid, prompt=prompt, params=params, sample_index=sample,
                    cache_space=spaces[index],
                    adapter=fields.text({"lora_path": adapters[index]}, "lora_path") if adapters[index] else "",
                )
            )  # fmt: skip
    flags = [
        fields.boolean({"return_logprob": flag}, "return_logprob", default=False) for flag in return_logprob
    ]
    return GenerateBatch(
        requests=tuple(requests),
        return_logprob=tuple(flag for flag in flags for _ in range(num_samples)),
        single=single and num_samples == 1,
    )


def parse_update(body: object) -> WeightUpdate:
    """Check an /update_weights_from_disk or /prepare_weights body. Raises InvalidRequest."""
    known = _UPDATE_FIELDS | _UPDATE_NEUTRAL.keys() | _UPDATE_IGNORED
    given = _body_fields(body, known=known, neutral=_UPDATE_NEUTRAL)
    version = fields.text(given, "weight_version", default="")
    if not version:
        raise InvalidRequest(
            "weight_version is missing; name the version, or its tokens would carry the old version's name"
        )
    return WeightUpdate(
        model_path=Path(fields.text(given, "model_path")),
        weight_version=version,
        flush_cache=fields.boolean(given, "flush_cache", default=True),
        abort_all_requests=fields.boolean(given, "abort_all_requests", default=False),
        prepared=fields.boolean(given, "prepared", default=False),
    )


def parse_adapter_load(body: object) -> AdapterLoad:
    """Check a /load_lora_adapter body. Raises InvalidRequest."""
    given = _body_fields(body, known={"lora_name", "lora_path", "pinned"})
    return AdapterLoad(name=_adapter_name(given), path=Path(fields.text(given, "lora_path")))


def parse_adapter_unload(body: object) -> str:
    """Check an /unload_lora_adapter body; the adapter's name. Raises InvalidRequest."""
    return _adapter_name(_body_fields(body, known={"lora_name"}))


def _adapter_name(given: Mapping[str, object]) -> str:
    name = fields.text(given, "lora_name")
    if not name:
        raise InvalidRequest("lora_name is empty; name the adapter")
    return name


def parse_pause(body: object) -> PauseMode:
    """Check a /pause_generation body; SGLang's default mode is abort. Raises InvalidRequest."""
    given = _body_fields(body, known={"mode"})
    mode = fields.text(given, "mode", default=PauseMode.ABORT.value)
    try:
        return PauseMode(mode)
    except ValueError as error:
        known = ", ".join(known.value for known in PauseMode)
        raise InvalidRequest(f"mode is {fields.shown(mode)}, expected one of: {known}") from error


def parse_abort(body: object) -> AbortRequest:
    """Check an /abort_request body. An empty rid without abort_all means nothing, as for SGLang."""
    given = _body_fields(body, known={"rid", "abort_all", "abort_message"})
    return AbortRequest(
        rid=fields.text(given, "rid", default=""),
        abort_all=fields.boolean(given, "abort_all", default=False),
    )


def render_completion(completion: Completion, *, with_logprobs: bool) -> dict[str, object]:
    """One answer of /generate."""
    meta: dict[str, object] = {
        "id": completion.request.rid,
        "finish_reason": _finish_reason(
            completion.finish, max_new_tokens=completion.request.params.max_new_tokens
        ),
        "prompt_tokens": len(completion.request.prompt),
        "completion_tokens": len(completion.tokens),
        "cached_tokens": completion.cached_tokens,
        "reasoning_tokens": 0,
        "num_retractions": completion.num_retractions,
        "weight_version": completion.spans[-1].version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.spans
        ],
        "e2e_latency": completion.latency_s,
    }
    if with_logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            (logprob, token, None)
            for logprob, token in zip(completion.logprobs, completion.tokens, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(completion.tokens)
    return {"output_ids": completion.tokens, "meta_info": meta}


def _finish_reason(finish: Finish, *, max_new_tokens: int) -> dict[str, object]:
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched_token}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": max_new_tokens}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def _body_fields(
    body: object, *, known: Set[str], neutral: Mapping[str, object] = MappingProxyType({})
) -> dict[str, object]:
    given = fields.json_object(body, name="the request body")
    fields.refuse_unknown(given, known, where="the request body")
    fields.refuse_other_than(given, neutral, where="request")
    return given


def _prompts(value: object, *, limits: ModelLimits) -> tuple[list[tuple[int, ...]], bool]:
    """The prompts, and whether the caller sent a single one."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"input_ids is {fields.shown(value)}, expected a non-empty list of token ids")
    single = not isinstance(value[0], list)
    rows = [value] if single else value
    return [
        _prompt(row, name="input_ids" if single else f"input_ids[{i}]", limits=limits)
        for i, row in enumerate(rows)
    ], single


def _prompt(value: object, *, name: str, limits: ModelLimits) -> tuple[int, ...]:
    prompt = fields.token_ids(value, name=name, vocab_size=limits.vocab_size)
    if not prompt:
        raise InvalidRequest(f"{name} is empty, expected at least one token id")
    if len(prompt) >= limits.context_length:
        raise InvalidRequest(
            f"{name} has {len(prompt)} tokens, the context length is {limits.context_length} and must hold "
            "at least one new token; shorten the prompt or start the engine with a larger --context-length"
        )
    return prompt


def _sampling_fields(value: object) -> dict[str, object]:
    given = fields.json_object(value, name="sampling_params")
    fields.refuse_unknown(
        given, _SAMPLING_FIELDS | _SAMPLING_NEUTRAL.keys() | _SAMPLING_IGNORED, where="sampling_params"
    )
    fields.refuse_other_than(given, _SAMPLING_NEUTRAL, where="sampling_params")
    return given


def _sampling_params(
    given: Mapping[str, object], *, prompt: tuple[int, ...], limits: ModelLimits
) -> SamplingParams:
    temperature = fields.number(
        given, "temperature", default=1.0, low=0.0, bound="a finite number of at least 0"
    )
    top_p = fields.number(given, "top_p", default=1.0, low=0.0, bound="a number above 0 and at most 1")
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"top_p is {top_p!r}, expected a number above 0 and at most 1")
    top_k = fields.integer(given, "top_k", default=-1, low=-1, high=2**31)
    if top_k == 0:
        raise InvalidRequest("top_k is 0, expected -1 (keep all) or at least 1")
    stops = fields.token_ids(
        given.get("stop_token_ids", []), name="stop_token_ids", vocab_size=limits.vocab_size
    )
    has_seed = "sampling_seed" in given
    return SamplingParams(
        max_new_tokens=_max_new_tokens(given, prompt=prompt, limits=limits),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=frozenset(stops),
        ignore_eos=fields.boolean(given, "ignore_eos", default=False),
        sampling_seed=fields.integer(given, "sampling_seed", default=0, low=0, high=_MAX_SEED)
        if has_seed
        else None,
    )


def _max_new_tokens(given: Mapping[str, object], *, prompt: tuple[int, ...], limits: ModelLimits) -> int:
    room = limits.context_length - len(prompt)
    if "max_new_tokens" not in given:
        return min(_DEFAULT_NEW_TOKENS, room)
    wanted = fields.integer(given, "max_new_tokens", default=0, low=1, high=2**31)
    if wanted > room:
        raise InvalidRequest(
            f"max_new_tokens is {wanted} after a prompt of {len(prompt)} tokens, the context length of "
            f"{limits.context_length} leaves {room}; ask for fewer or start the engine with a larger "
            "--context-length"
        )
    return wanted


def _num_samples(sampling: list[dict[str, object]]) -> int:
    counts = {fields.integer(given, "n", default=1, low=1, high=_MAX_SAMPLES) for given in sampling}
    if len(counts) != 1:
        raise InvalidRequest(
            f"n differs between the prompts of one batch ({sorted(counts)}); send one n for all"
        )
    return counts.pop()


def _spread(given: Mapping[str, object], name: str, num_prompts: int, default: object) -> list[object]:
    """One value per prompt, from a single value or a list of as many."""
    value = given.get(name, default)
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidRequest(
            f"{name} has {len(value)} entries for {num_prompts} prompts; send one, or one each"
        )
    return value


def _rids(
    value: object, *, num_prompts: int, num_samples: int, single: bool, new_rid: Callable[[], str]
) -> list[tuple[str, str]]:
    """(name the client knows, own name) of every sequence, prompt by prompt."""
    num_sequences = num_prompts * num_samples
    if value is None:
        fresh = [new_rid() for _ in range(num_sequences)]
        return [(rid, rid) for rid in fresh]
    if isinstance(value, str) and value:
        if num_sequences == 1:
            return [(value, value)]
        return [(value, f"{value}_{index}") for index in range(num_sequences)]
    if single or not isinstance(value, list) or not all(isinstance(rid, str) and rid for rid in value):
        raise InvalidRequest(f"rid is {fields.shown(value)}, expected a non-empty string, or one per prompt")
    if len(value) != num_prompts or len(set(value)) != num_prompts:
        raise InvalidRequest(f"rid has {len(value)} entries, expected {num_prompts} different ones")
    if num_samples == 1:
        return [(rid, rid) for rid in value]
    return [(rid, f"{rid}_{sample}") for rid in value for sample in range(num_samples)]


def _cache_spaces(given: Mapping[str, object], *, num_prompts: int) -> list[str]:
    """Prefixes are shared only inside one space; `extra_key` and `cache_salt` both open one."""
    keys = _spread(given, "extra_key", num_prompts, "")
    salts = _spread(given, "cache_salt", num_prompts, "")
    return [
        "\0".join(fields.text(parts, name) for name in parts)
        for parts in ({"extra_key": key, "cache_salt": salt} for key, salt in zip(keys, salts, strict=True))
    ]

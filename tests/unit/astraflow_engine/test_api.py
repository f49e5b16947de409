"""SGLang's bodies: what is accepted, what is refused and with which message, and how answers look."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from astraflow_engine import api, requests
from astraflow_engine.errors import InvalidRequest
from astraflow_engine.requests import FinishKind, GenerateRequest, PauseMode, SamplingParams

LIMITS = api.ModelLimits(vocab_size=100, context_length=64)
PROMPT = [3, 4, 5]


def parse(**body: object) -> api.GenerateBatch:
    fresh = (f"fresh{number}" for number in itertools.count())
    return api.parse_generate({"input_ids": PROMPT, **body}, limits=LIMITS, new_rid=lambda: next(fresh))


def sampling(**params: object) -> SamplingParams:
    return parse(sampling_params=params).requests[0].params


# --- /generate


def test_a_minimal_body_gets_sglang_s_defaults() -> None:
    batch = parse()
    assert batch.single
    assert batch.return_logprob == (False,)
    (request,) = batch.requests
    assert (request.prompt, request.rid) == ((3, 4, 5), "fresh0")
    assert request.params == SamplingParams(max_new_tokens=61, temperature=1.0, top_p=1.0, top_k=-1)


def test_every_sampling_parameter_is_read() -> None:
    numbers: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 40}
    others: dict[str, Any] = {"ignore_eos": True, "sampling_seed": 11}
    read = sampling(stop_token_ids=[7, 8], **numbers, **others)
    assert read == SamplingParams(stop_token_ids=frozenset([7, 8]), **numbers, **others)


def test_null_means_the_default() -> None:
    assert sampling(temperature=None, top_k=None, stop_token_ids=None, stop=None) == sampling()


def test_a_tiny_temperature_is_greedy() -> None:
    assert sampling(temperature=1e-9).temperature == 0.0


def test_a_batch_takes_one_setting_for_all_or_one_each() -> None:
    batch = parse(
        input_ids=[[3], [4, 5]],
        sampling_params=[{"temperature": 0.5}, {"temperature": 0.0}],
        return_logprob=[True, False],
        rid=["a", "b"],
        extra_key="v7",
    )
    assert not batch.single
    assert [request.rid for request in batch.requests] == ["a", "b"]
    assert [request.params.temperature for request in batch.requests] == [0.5, 0.0]
    assert batch.return_logprob == (True, False)
    assert len({request.cache_space for request in batch.requests}) == 1


def test_a_batch_of_one_is_still_a_batch() -> None:
    assert not parse(input_ids=[PROMPT]).single


def test_n_samples_follow_each_other_prompt_by_prompt() -> None:
    batch = parse(input_ids=[[3], [4]], sampling_params={"n": 2}, rid=["a", "b"])
    named = [(r.prompt[0], r.rid, r.batch_rid, r.sample_index) for r in batch.requests]
    assert named == [(3, "a_0", "a", 0), (3, "a_1", "a", 1), (4, "b_0", "b", 0), (4, "b_1", "b", 1)]


def test_a_single_rid_is_numbered_over_several_sequences() -> None:
    batch = parse(sampling_params={"n": 3}, rid="mine")
    assert [request.rid for request in batch.requests] == ["mine_0", "mine_1", "mine_2"]
    assert not batch.single


def test_extra_key_and_cache_salt_open_different_spaces() -> None:
    batches = parse(), parse(extra_key="x"), parse(cache_salt="x")
    assert len({batch.requests[0].cache_space for batch in batches}) == 3


def test_fields_that_change_nothing_are_accepted() -> None:
    parse(stream=False, log_metrics=True, priority=3, logprob_start_len=-1)
    parse(top_logprobs_num=0, token_ids_logprob=[])
    sampling(min_p=0.0, repetition_penalty=1.0, skip_special_tokens=False)
    sampling(stop=[], no_stop_trim=True, min_new_tokens=0)


BAD_BODIES: list[tuple[dict[str, object], str]] = [
    ({"text": "hi"}, "this engine has no tokenizer"),
    ({"input_ids": None}, "input_ids is missing"),
    ({"input_ids": []}, r"input_ids is \[\], expected a non-empty list"),
    ({"input_ids": [[3], []]}, r"input_ids\[1\] is empty"),
    ({"input_ids": [3, 100]}, r"input_ids\[1\] is 100, expected a token id from 0 to 99"),
    ({"input_ids": [3, -1]}, r"input_ids\[1\] is -1"),
    ({"input_ids": [3, True]}, r"input_ids\[1\] is True"),
    ({"input_ids": [3, 1.0]}, r"input_ids\[1\] is 1.0"),
    ({"input_ids": [[3], 4]}, r"input_ids\[1\] is 4, expected a list"),
    ({"input_ids": [3] * 64}, "has 64 tokens, the context length is 64"),
    ({"stream": True}, "request.stream is True, this engine supports only False"),
    ({"top_logprobs_num": 5}, "top_logprobs_num is 5"),
    ({"logprob_start_len": 0}, "logprob_start_len is 0, this engine supports only -1"),
    ({"lora_path": 3}, "lora_path is 3, expected a string"),
    ({"lora_path": ["a", "b"]}, "lora_path has 2 entries for 1 prompts"),
    ({"input_idz": 1}, "unknown field 'input_idz'. Did you mean 'input_ids'"),
    ({"return_logprob": "yes"}, "return_logprob is 'yes', expected true or false"),
    ({"return_logprob": [True, True]}, "return_logprob has 2 entries for 1 prompts"),
    ({"rid": ""}, "rid is ''"),
    ({"rid": 3}, "rid is 3"),
    ({"rid": ["a"]}, r"rid is \['a'\], expected a non-empty string"),
    ({"input_ids": [[3], [4]], "rid": ["a", "a"]}, "expected 2 different ones"),
    ({"sampling_params": 3}, "sampling_params is 3, expected a JSON object"),
    ({"sampling_params": "x"}, "sampling_params is 'x', expected a JSON object"),
    ({"extra_key": 3}, "extra_key is 3, expected a string"),
]
BAD_SAMPLING: list[tuple[dict[str, object], str]] = [
    ({"temperature": float("nan")}, "temperature is nan, expected a finite number of at least 0"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"top_p": 0}, "top_p is 0.0, expected a number above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_k": 0}, r"top_k is 0, expected -1 \(keep all\) or at least 1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0, expected an integer from 1"),
    ({"max_new_tokens": 62}, "62 after a prompt of 3 tokens, the context length of 64 leaves 61"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    ({"max_new_tokens": True}, "max_new_tokens is True, expected an integer"),
    ({"max_new_tokens": "1"}, "max_new_tokens is '1', expected an integer"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"stop_token_ids": [100]}, r"stop_token_ids\[0\] is 100"),
    ({"stop_token_ids": 7}, "stop_token_ids is 7, expected a list"),
    ({"ignore_eos": 1}, "ignore_eos is 1"),
    ({"n": 0}, "n is 0"),
    ({"sampling_seed": -1}, "sampling_seed is -1"),
    ({"stop": ["x"]}, r"sampling_params.stop is \['x'\], this engine supports only None"),
    ({"min_p": 0.1}, "min_p is 0.1"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5"),
    ({"regex": "a+"}, "regex is 'a"),
    ({"temprature": 1}, "unknown field 'temprature'. Did you mean 'temperature'"),
]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [*BAD_BODIES, *(({"sampling_params": params}, complaint) for params, complaint in BAD_SAMPLING)],
)
def test_a_bad_body_is_refused_with_value_limit_and_remedy(body: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        parse(**body)


def test_prompts_of_one_batch_take_the_same_n() -> None:
    with pytest.raises(InvalidRequest, match=r"n differs between the prompts of one batch \(\[1, 2\]\)"):
        parse(input_ids=[[3], [4]], sampling_params=[{"n": 1}, {"n": 2}])


# --- control


def test_an_update_names_its_version() -> None:
    update = api.parse_update({"model_path": "/models/7", "weight_version": "7", "load_format": "auto"})
    assert (update.model_path, update.weight_version) == (Path("/models/7"), "7")
    assert (update.flush_cache, update.abort_all_requests) == (True, False)


BAD_UPDATES = [
    ({"model_path": "/m"}, "weight_version is missing"),
    ({"weight_version": "1"}, "model_path is missing"),
    ({"model_path": "/m", "weight_version": 7}, "weight_version is 7, expected a string"),
    ({"model_path": "/m", "weight_version": "7", "is_async": True}, "is_async is True"),
    ({"model_path": "/m", "weight_version": "7", "flush_cache": "no"}, "flush_cache is 'no'"),
    ({"model_path": "/m", "weight_version": "7", "flush_cash": True}, "Did you mean 'flush_cache'"),
]


@pytest.mark.parametrize(("body", "complaint"), BAD_UPDATES)
def test_a_bad_update_is_refused(body: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        api.parse_update(body)


def test_a_pause_aborts_unless_told_otherwise() -> None:
    assert api.parse_pause({}) is PauseMode.ABORT
    assert api.parse_pause({"mode": "retract"}) is PauseMode.RETRACT
    with pytest.raises(InvalidRequest, match="mode is 'gently', expected one of: abort, retract, in_place"):
        api.parse_pause({"mode": "gently"})


ABORTED = [
    ({"rid": "a"}, ["a_0", "a_1"]),
    ({"rid": "a_1"}, ["a_1"]),
    ({"rid": "b"}, ["b"]),
    ({"rid": "unknown"}, []),
    ({"abort_all": True}, ["a_0", "a_1", "b"]),
]


@pytest.mark.parametrize(("body", "aborted"), ABORTED)
def test_an_abort_means_the_request_and_all_its_samples(body: dict[str, object], aborted: list[str]) -> None:
    order = api.parse_abort(body)
    requests = [*parse(sampling_params={"n": 2}, rid="a").requests, *parse(rid="b").requests]
    assert [request.rid for request in requests if order.matches(request)] == aborted


# --- answers


def completion(finish: requests.Finish) -> requests.Completion:
    request = GenerateRequest(rid="r", prompt=(3, 4), params=SamplingParams(max_new_tokens=3))
    ends = [("1", 0, 1), ("2", 1, 3)]
    return requests.Completion(
        request=request,
        tokens=(7, 8, 2),
        logprobs=(-0.5, -1.5, -2.5),
        spans=tuple(requests.VersionSpan(version=name, start=start, end=end) for name, start, end in ends),
        finish=finish,
        cached_tokens=1,
        num_retractions=0,
        latency_s=0.25,
    )


REASONS = [
    (requests.Finish(kind=FinishKind.STOP, matched_token=2), {"type": "stop", "matched": 2}),
    (requests.Finish(kind=FinishKind.LENGTH), {"type": "length", "length": 3}),
    (
        requests.Finish(kind=FinishKind.ABORT, message="Aborted"),
        {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    ),
]


@pytest.mark.parametrize(("finish", "reason"), REASONS)
def test_an_answer_has_sglang_s_members(finish: requests.Finish, reason: dict[str, object]) -> None:
    answer = json.loads(json.dumps(api.render_completion(completion(finish), with_logprobs=True)))
    assert answer["output_ids"] == [7, 8, 2]
    assert answer["meta_info"] == {
        "id": "r",
        "finish_reason": reason,
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}],
        "e2e_latency": 0.25,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 2, None]],
        "output_token_logprobs_length": 3,
    }


def test_log_probs_come_only_when_asked_for() -> None:
    answer = api.render_completion(completion(requests.Finish(kind=FinishKind.LENGTH)), with_logprobs=False)
    assert "output_token_logprobs" not in json.dumps(answer)

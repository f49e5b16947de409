"""What a rollout node relies on in an inference engine's HTTP API, as a table of checks.

Each check takes an `EngineUnderTest` and knows nothing of who serves it: `tests/contract/test_engine_http.py` runs all
of them against the embedded engine and against SGLang. Checks leave the engine idle, unpaused and on the weights they
found. A token outside the vocabulary is not among the bad calls: SGLang 0.5.20 dies of it, so a node never sends one.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from astraflow_raas.engine.base import EngineLoad
from astraflow_raas.engine.load import read_load
from support.tiny_models import load_adapted_reference, load_reference, reference_logprobs

Json = dict[str, Any]
Check = Callable[["EngineUnderTest"], None]

CALL_DEADLINE_S = 60.0
LONG = 3_000
LOGPROB_TOLERANCE = 1e-4
PROMPT = [5, 9, 13, 17, 21, 25, 29, 33, 37, 41]


def make_client() -> httpx.Client:
    """A client with this module's deadline; close it."""
    return httpx.Client(timeout=CALL_DEADLINE_S, trust_env=False)


@dataclass(frozen=True, kw_only=True)
class EngineUnderTest:
    """An engine, the two checkpoints of one architecture it may load, and how exactly it computes."""

    url: str
    first: Path
    """Served at the start and after every check."""
    second: Path
    adapters: tuple[Path, Path]
    """Of the first, of all linear layers and of attention alone."""
    vocab_size: int
    context_length: int
    client: httpx.Client

    def post(self, path: str, body: object) -> httpx.Response:
        """Bytes go as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"content-type": "application/json"}
        return self.client.post(self.url + path, content=content, headers=headers)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def generate(self, input_ids: object = None, *, sampling: object = None, **body: object) -> Any:
        """The answer of a /generate that must succeed; greedy, 8 tokens, log-probs, unless told otherwise."""
        given = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        sampling = given | dict(sampling) if isinstance(sampling, Mapping) else sampling or given
        request = {"input_ids": input_ids or PROMPT, "sampling_params": sampling, "return_logprob": True}
        return self.accepts("/generate", request | body).json()

    def accepts(self, path: str, body: object) -> httpx.Response:
        """The response to a POST that must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response

    def refuses(self, path: str, body: object, *, what: str = "") -> None:
        """A POST that must be answered 400 with a reason; `what` names it if it is not."""
        response = self.post(path, body)
        assert response.status_code == 400, f"{what}: {response.status_code} {response.text}"
        assert error_message(response.json()), what

    def load(self, folder: Path, version: str) -> httpx.Response:
        """An update as a node sends it, which keeps the prefixes: SGLang dies of one that is to flush them while a
        call is live, and a call is for a moment after its answer.
        """
        named = {"model_path": str(folder), "weight_version": version, "flush_cache": False}
        return self.post("/update_weights_from_disk", named)

    def flush(self) -> None:
        """Forget all prefixes as soon as no call is live."""
        self.accepts(f"/flush_cache?timeout={CALL_DEADLINE_S / 2}", {})

    def version(self) -> str:
        return str(self.get("/model_info").json()["weight_version"])

    @contextmanager
    def background(self, **body: object) -> Iterator["Future[Json]"]:
        """A long greedy generation that runs meanwhile; resumed and awaited at the end whatever happened."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.generate, sampling={"max_new_tokens": LONG}, **body)
            try:
                yield running
            finally:
                self.post("/continue_generation", {})


def check_health(engine: EngineUnderTest) -> None:
    assert engine.get("/health").status_code == 200
    assert engine.get("/health_generate").status_code == 200


def check_information(engine: EngineUnderTest) -> None:
    info = engine.get("/model_info").json()
    assert info["is_generation"] is True
    assert info["model_path"]
    assert isinstance(info["weight_version"], str)
    assert engine.get("/get_model_info").json()["weight_version"] == info["weight_version"]
    server = engine.get("/server_info").json()
    assert isinstance(server["internal_states"], list)
    assert server["max_req_input_len"] < engine.context_length


def check_load(engine: EngineUnderTest) -> None:
    with engine.background(rid="contract-load"):
        while not (load := _load(engine)).running:
            time.sleep(0.01)
        assert load.waiting == 0
        assert load.kv_usage is not None
        engine.accepts("/abort_request", {"rid": "contract-load"})


def _load(engine: EngineUnderTest) -> EngineLoad:
    """As a node reads it."""
    return read_load(engine.get("/v1/loads?include=core").json(), where="the engine")


def check_single_answer(engine: EngineUnderTest) -> None:
    answer = engine.generate(rid="contract-single")
    meta = answer["meta_info"]
    assert meta["id"] == "contract-single"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 8)
    assert len(answer["output_ids"]) == 8
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(len(entry) == 3 and math.isfinite(entry[0]) for entry in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 8}]
    assert meta["num_retractions"] == 0


def check_batch_keeps_order(engine: EngineUnderTest) -> None:
    prompts = [[7] * (3 + index) for index in range(5)]
    rids = [f"contract-batch-{index}" for index in range(5)]
    alone = [engine.generate(prompt)["output_ids"] for prompt in prompts]
    answers = engine.generate(prompts, rid=rids)
    assert [answer["meta_info"]["id"] for answer in answers] == rids
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 4, 5, 6, 7]
    assert [answer["output_ids"] for answer in answers] == alone


def check_batch_takes_one_setting_each(engine: EngineUnderTest) -> None:
    settings = [{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} for length in (2, 5)]
    answers = engine.generate([PROMPT, PROMPT], sampling=settings, extra_key="contract")
    assert [len(answer["output_ids"]) for answer in answers] == [2, 5]


def check_several_samples(engine: EngineUnderTest) -> None:
    answers = engine.generate(sampling={"n": 3, "temperature": 1.0, "max_new_tokens": 16})
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3


def check_stop_token(engine: EngineUnderTest) -> None:
    free = engine.generate()["output_ids"]
    answer = engine.generate(sampling={"ignore_eos": False, "stop_token_ids": [free[4]]})
    stopped = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[4]}
    assert stopped == free[: free.index(free[4]) + 1]


def check_log_probs(engine: EngineUnderTest) -> None:
    reference = load_reference(engine.first)
    for temperature in (0.0, 0.7, 1.0):
        answer = engine.generate(sampling={"temperature": temperature, "max_new_tokens": 16})
        expected = reference_logprobs(reference, PROMPT, answer["output_ids"], temperature=temperature or 1.0)
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        assert difference <= LOGPROB_TOLERANCE, f"temperature {temperature}: {difference}"


def check_adapters(engine: EngineUnderTest) -> None:
    names = ["contract@1", "contract@2"]
    for name, folder in zip(names, engine.adapters, strict=True):
        answer = engine.accepts("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}).json()
        assert (answer["success"], name in answer["loaded_adapters"]) == (True, True)
    answers = engine.generate([PROMPT] * 3, lora_path=[None, *names])
    references = [load_reference(engine.first)]
    references += [load_adapted_reference(folder, model=engine.first) for folder in engine.adapters]
    for answer, reference in zip(answers, references, strict=True):
        expected = reference_logprobs(reference, PROMPT, answer["output_ids"])
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) <= LOGPROB_TOLERANCE
        assert answer["meta_info"]["weight_version"] == engine.version()
    for name in names:
        engine.accepts("/unload_lora_adapter", {"lora_name": name})
    # One that was unloaded is loaded again by SGLang where it is named, from the folder that it was in.
    engine.refuses("/generate", {"input_ids": PROMPT, "lora_path": "contract@3"}, what="an unknown adapter")
    missing = engine.post("/load_lora_adapter", {"lora_name": "contract@3", "lora_path": "/nowhere"})
    assert (missing.status_code, missing.json()["success"]) == (400, False)


def check_swap_in_place(engine: EngineUnderTest) -> None:
    assert _through_swap(engine, mode="in_place")["num_retractions"] == 0


def check_swap_with_retraction(engine: EngineUnderTest) -> None:
    assert _through_swap(engine, mode="retract")["num_retractions"] >= 1


def check_swap_of_an_idle_engine(engine: EngineUnderTest) -> None:
    before, old = engine.generate()["output_ids"], engine.version()
    response = engine.load(engine.second, "contract-idle")
    assert (response.status_code, response.json()["success"]) == (200, True)
    engine.flush()
    after = engine.generate()
    assert after["output_ids"] != before
    assert after["meta_info"]["weight_version"] == engine.version() == "contract-idle"
    _restore(engine, old)
    assert engine.generate()["output_ids"] == before


def check_failed_update(engine: EngineUnderTest) -> None:
    before, version = engine.generate()["output_ids"], engine.version()
    response = engine.load(engine.first.parent / "no-such-folder", "contract-lost")
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert response.json()["message"]
    answer = engine.generate()
    assert answer["output_ids"] == before
    assert answer["meta_info"]["weight_version"] == version


def check_pause_with_abort(engine: EngineUnderTest) -> None:
    pause = partial(engine.accepts, "/pause_generation", {"mode": "abort"})
    answer = _while_running(engine, pause, met=lambda meta: bool(meta["completion_tokens"]))
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < LONG
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"])


def check_requests_wait_while_paused(engine: EngineUnderTest) -> None:
    engine.accepts("/pause_generation", {"mode": "in_place"})
    with engine.background() as running:
        time.sleep(0.3)
        assert not running.done()
        engine.accepts("/continue_generation", {"torch_empty_cache": False})
        assert len(running.result(CALL_DEADLINE_S)["output_ids"]) == LONG


def check_abort_request(engine: EngineUnderTest) -> None:
    rid = "contract-abort"
    abort = partial(engine.accepts, "/abort_request", {"rid": rid})
    answer = _while_running(engine, abort, met=lambda meta: meta["finish_reason"]["type"] == "abort", rid=rid)
    assert len(answer["output_ids"]) < LONG


def check_abort_of_an_unknown_request(engine: EngineUnderTest) -> None:
    engine.accepts("/abort_request", {"rid": "contract-nobody"})


def check_flush_cache(engine: EngineUnderTest) -> None:
    engine.flush()
    answers: list[int] = []

    def flush() -> None:
        engine.accepts("/pause_generation", {"mode": "in_place"})
        answers.append(engine.post("/flush_cache", {}).status_code)
        engine.accepts("/continue_generation", {})

    _while_running(engine, flush, met=lambda _meta: answers[-1] == 400)


BAD_GENERATE: dict[str, Json] = {
    "no prompt": {},
    "an empty prompt": {"input_ids": []},
    "a negative temperature": {"input_ids": [5], "sampling_params": {"temperature": -1.0}},
    "top_p of 0": {"input_ids": [5], "sampling_params": {"top_p": 0.0}},
    "top_k of 0": {"input_ids": [5], "sampling_params": {"top_k": 0}},
    "input_ids of the wrong type": {"input_ids": "5 6 7"},
    "duplicate rids": {"input_ids": [[5], [6]], "rid": ["same", "same"]},
}


def check_bad_generate(engine: EngineUnderTest) -> None:
    too_long = {"input_ids": [5] * (engine.context_length + 1)}
    too_many = {"input_ids": [5], "sampling_params": {"max_new_tokens": engine.context_length}}
    for what, body in {**BAD_GENERATE, "a long prompt": too_long, "too many new tokens": too_many}.items():
        engine.refuses("/generate", body, what=what)


def check_malformed_bodies(engine: EngineUnderTest) -> None:
    engine.refuses("/generate", b"{", what="no JSON")
    engine.refuses("/generate", b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}', what="NaN")


def check_bad_control(engine: EngineUnderTest) -> None:
    assert engine.post("/pause_generation", {"mode": "gently"}).status_code == 400
    assert engine.post("/update_weights_from_disk", {"weight_version": "1"}).status_code == 400
    assert engine.get("/no_such_path").status_code == 404


def error_message(body: Json) -> str:
    """The message of an error in either of SGLang's two shapes."""
    nested = body.get("error")
    return str(nested["message"] if isinstance(nested, dict) else body["message"])


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for name, check in sorted(globals().items())
    if name.startswith("check_")
}


def _while_running(
    engine: EngineUnderTest,
    act: Callable[[], object],
    *,
    met: Callable[[Json], bool],
    after: Callable[[], None] = lambda: None,
    **body: object,
) -> Json:
    """The answer of a long generation that `act` met while it ran, as `met` sees by its meta_info: tried with growing
    delays, because fast and slow machines alike have to be hit. `after` undoes each try.
    """
    for delay_s in (0.2, 0.6, 1.8, 5.4):
        with engine.background(**body) as running:
            time.sleep(delay_s)
            act()
            answer = running.result(CALL_DEADLINE_S)
        after()
        if met(answer["meta_info"]):
            return answer
    raise AssertionError(f"never met while it ran; last: {answer['meta_info']}")


def _through_swap(engine: EngineUnderTest, *, mode: str) -> Json:
    """Pause a long generation, swap weights under it, continue; the meta_info of its answer."""
    old = engine.version()

    def swap() -> None:
        engine.accepts("/pause_generation", {"mode": mode})
        response = engine.load(engine.second, f"contract-{mode}")
        assert response.status_code == 200, response.text
        engine.accepts("/continue_generation", {"torch_empty_cache": False})

    restore = partial(_restore, engine, old)
    answer = _while_running(engine, swap, met=lambda meta: len(meta["weight_versions"]) > 1, after=restore)
    meta: Json = answer["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == (old, f"contract-{mode}")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], LONG)
    assert 0 < first["end"] < LONG
    assert meta["weight_version"] == f"contract-{mode}"
    assert len(answer["output_ids"]) == LONG
    assert meta["finish_reason"] == {"type": "length", "length": LONG}
    return meta


def _restore(engine: EngineUnderTest, version: str) -> None:
    assert engine.load(engine.first, version).status_code == 200
    engine.flush()
    assert engine.version() == version

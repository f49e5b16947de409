"""The engine step by step: batching changes nothing, swaps and pauses do exactly what they say."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from astraflow_engine import model_config, scheduler
from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.errors import CacheInUse
from astraflow_engine.linear import Linear
from astraflow_engine.requests import Completion, FinishKind, GenerateRequest, PauseMode, SamplingParams
from astraflow_engine.weights import Weights, load_weights
from support import manual_clock, tiny_models

TOLERANCE = 1e-4
LENGTHS = [5, 17, 9, 30, 1, 12, 26, 3, 20, 8]
PROMPTS = [tuple(range(3 + i, 3 + i + length)) for i, length in enumerate(LENGTHS)]


@dataclass(frozen=True)
class Model:
    """One checkpoint as the engine and as transformers see it."""

    config: model_config.ModelConfig
    weights: Weights
    reference: PreTrainedModel

    @classmethod
    def random(cls, folder: Path, *, seed: int, model_type: str = "qwen3") -> "Model":
        shape = tiny_models.TinyShape(model_type=model_type)
        config = model_config.load_model_config(tiny_models.save_tiny_model(folder, seed=seed, shape=shape))
        return cls(config, load_weights(folder, config=config), tiny_models.load_reference(folder))

    def greedy(self, prompt: Sequence[int], *, num_tokens: int = 12) -> tuple[int, ...]:
        return tuple(tiny_models.reference_greedy(self.reference, prompt, num_tokens=num_tokens))

    def agrees(self, completion: Completion, *, temperature: float = 1.0) -> bool:
        """Whether the log-probs are those of transformers."""
        prompt, tokens = completion.request.prompt, completion.tokens
        expected = tiny_models.reference_logprobs(self.reference, prompt, tokens, temperature=temperature)
        return completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.random(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.random(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def core(old: Model) -> EngineCore:
    return make_core(old)


def make_core(model: Model, *, num_slots: int = 4, seed: int = 0) -> EngineCore:
    admission = scheduler.AdmissionLimits(max_waiting=64, max_prefill_tokens=200)
    limits = CoreLimits(num_slots=num_slots, capacity=96, admission=admission, pass_tokens=16)
    clock = manual_clock.ManualClock()
    return EngineCore(model.config, model.weights, limits=limits, seed=seed, version="0", clock=clock)


def ask(rid: str, prompt: tuple[int, ...] = PROMPTS[1], **params: object) -> GenerateRequest:
    """A request that ignores end tokens unless told otherwise."""
    given: dict[str, object] = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(rid=rid, prompt=prompt, params=SamplingParams(**given), batch_rid=rid)  # type: ignore[arg-type]


def asks(count: int, **params: object) -> list[GenerateRequest]:
    """Requests "0", "1", … with a prompt each."""
    return [ask(str(index), prompt, **params) for index, prompt in enumerate(PROMPTS[:count])]


def copies(count: int, **params: object) -> list[GenerateRequest]:
    """Requests "0", "1", … with the same prompt."""
    return [ask(str(index), **params) for index in range(count)]


def finish_all(core: EngineCore) -> dict[str, Completion]:
    """Step until nothing is left."""
    done: dict[str, Completion] = {}
    while core.has_work:
        done |= {completion.request.rid: completion for completion in core.step()}
    return done


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, Completion]:
    begin(core, *requests)
    return finish_all(core)


def begin(core: EngineCore, *requests: GenerateRequest, steps: int = 0) -> None:
    """Submit requests and make this many passes, in which none ends."""
    for request in requests:
        core.submit(request)
    assert [core.step() for _ in range(steps)] == [[]] * steps


def swap(core: EngineCore, model: Model, *, flush_cache: bool = False) -> None:
    """Change to the weights of a model as version 1."""
    core.swap(model.weights, version="1", flush_cache=flush_cache)


def spans(completion: Completion) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.spans]


# --- agreement


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_and_log_probs_agree_with_transformers(tmp_path: Path, model_type: str) -> None:
    model = Model.random(tmp_path, seed=0, model_type=model_type)
    for completion in run(make_core(model), *asks(len(PROMPTS))).values():
        assert completion.tokens == model.greedy(completion.request.prompt)
        assert model.agrees(completion)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_log_probs_agree_with_transformers(core: EngineCore, old: Model, temperature: float) -> None:
    for completion in run(core, *asks(len(PROMPTS), temperature=temperature)).values():
        assert old.agrees(completion, temperature=temperature)


# --- batching


def test_continuous_batching_gives_what_one_by_one_gives(old: Model) -> None:
    requests = [
        ask(str(i), prompt, temperature=1.0, sampling_seed=i, max_new_tokens=5 + 7 * (i % 4))
        for i, prompt in enumerate(PROMPTS * 3)
    ]
    together = run(make_core(old), *requests)
    for request in requests:
        alone = run(make_core(old, num_slots=1), request)[request.rid]
        assert together[request.rid].tokens == alone.tokens
        assert together[request.rid].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_requests_that_arrive_while_others_run_enter_freed_slots(core: EngineCore, old: Model) -> None:
    requests = [ask(str(index), PROMPTS[index], max_new_tokens=3 + 5 * index) for index in range(4)]
    begin(core, *requests, steps=2)
    done = run(core, ask("late", PROMPTS[5], max_new_tokens=6))
    assert list(done) == ["0", "late", "1", "2", "3"]
    assert done["late"].tokens == old.greedy(PROMPTS[5], num_tokens=6)


def test_slots_that_are_moved_together_keep_their_sequences(old: Model) -> None:
    core = make_core(old, num_slots=8)
    lengths = [2, 3, 2, 4, 2, 3, 30, 28]
    done = run(core, *(ask(str(i), PROMPTS[i], max_new_tokens=n) for i, n in enumerate(lengths)))
    for index in (6, 7):
        assert done[str(index)].tokens == old.greedy(PROMPTS[index], num_tokens=lengths[index])


# --- seeds


def test_a_sampling_seed_repeats_and_another_server_seed_does_not(old: Model) -> None:
    request = ask("r", temperature=1.0, sampling_seed=5, max_new_tokens=20)
    first, again, other = (run(make_core(old, seed=seed), request)["r"].tokens for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_samples_of_one_request_differ_and_the_first_is_the_request_alone(core: EngineCore) -> None:
    base = ask("r", temperature=1.0, sampling_seed=5, max_new_tokens=20)
    done = run(core, *(replace(base, rid=f"r_{index}", sample_index=index) for index in range(3)))
    assert len({completion.tokens for completion in done.values()}) == 3
    assert run(core, base)["r"].tokens == done["r_0"].tokens


def test_requests_without_a_seed_differ(core: EngineCore) -> None:
    done = run(core, *copies(3, temperature=1.0, max_new_tokens=20))
    assert len({completion.tokens for completion in done.values()}) == 3


# --- ends


def test_the_model_s_own_end_token_ends_unless_ignored(core: EngineCore) -> None:
    going = [ask(str(seed), temperature=3.0, sampling_seed=seed, max_new_tokens=60) for seed in range(8)]
    ending = [replace(request, params=replace(request.params, ignore_eos=False)) for request in going]
    free, ended = run(core, *going), run(core, *ending)
    assert any(completion.finish.matched_token == tiny_models.EOS for completion in ended.values())
    for rid, completion in ended.items():
        assert len(free[rid].tokens) == 60
        assert tiny_models.EOS not in completion.tokens[:-1]
        assert completion.tokens == free[rid].tokens[: len(completion.tokens)]


def test_a_sequence_may_fill_its_slot_to_the_last_position(core: EngineCore, old: Model) -> None:
    prompt = tuple(3 + i % 90 for i in range(90))
    completion = run(core, ask("full", prompt, max_new_tokens=6))["full"]
    assert completion.tokens == old.greedy(prompt, num_tokens=6)
    assert completion.finish.kind is FinishKind.LENGTH


# --- prefixes


def test_samples_of_one_prompt_are_prefilled_once(core: EngineCore, old: Model) -> None:
    done = run(core, *copies(4))
    assert [done[str(index)].cached_tokens for index in range(4)] == [0, 17, 17, 17]
    assert {completion.tokens for completion in done.values()} == {old.greedy(PROMPTS[1])}


def test_what_a_row_holds_but_for_the_last_token_enters_without_a_pass_of_its_own(
    core: EngineCore, old: Model
) -> None:
    begin(core, ask("running", PROMPTS[3], max_new_tokens=40), ask("known", max_new_tokens=40), steps=3)
    passes = core.stats().num_passes
    again, one_token = ask("again"), ask("one token", PROMPTS[4])
    begin(core, again, one_token, steps=1)
    assert (core.stats().num_passes - passes, core.stats().num_running) == (1, 4)
    done = finish_all(core)
    assert (done["again"].tokens, done["again"].cached_tokens) == (
        old.greedy(PROMPTS[1]),
        len(PROMPTS[1]) - 1,
    )
    assert done["one token"].tokens == old.greedy(PROMPTS[4])
    assert done["running"].tokens == old.greedy(PROMPTS[3], num_tokens=40)


def test_a_later_turn_reuses_prompt_and_answer_of_the_earlier_one(core: EngineCore, old: Model) -> None:
    first = run(core, ask("turn 1"))["turn 1"]
    conversation = (*PROMPTS[1], *first.tokens, 40, 41, 42)
    second = run(core, ask("turn 2", conversation))["turn 2"]
    # All but the last answer token went through the model in the first turn.
    assert second.cached_tokens == len(PROMPTS[1]) + len(first.tokens) - 1
    assert second.tokens == old.greedy(conversation)


def test_branches_of_one_conversation_do_not_disturb_each_other(core: EngineCore, old: Model) -> None:
    first = run(core, ask("turn 1"))["turn 1"]
    conversation = (*PROMPTS[1], *first.tokens)
    done = run(core, *(ask(str(branch), (*conversation, 40 + branch)) for branch in range(4)))
    for completion in done.values():
        assert completion.tokens == old.greedy(completion.request.prompt)
        assert completion.cached_tokens >= len(conversation) - 1


def test_another_cache_space_shares_nothing(core: EngineCore) -> None:
    done = run(core, ask("a"), replace(ask("b"), cache_space="elsewhere"))
    assert [done[rid].cached_tokens for rid in "ab"] == [0, 0]


def test_prefixes_end_at_a_swap_and_the_new_weights_are_used_throughout(core: EngineCore, new: Model) -> None:
    run(core, ask("warm"))
    assert run(core, ask("reused"))["reused"].cached_tokens == len(PROMPTS[1]) - 1
    swap(core, new)
    after = run(core, ask("after"))["after"]
    assert after.cached_tokens == 0
    assert after.tokens == new.greedy(PROMPTS[1])
    assert spans(after) == [("1", 0, 12)]


def test_a_row_that_lived_through_a_swap_is_never_reused(core: EngineCore, new: Model) -> None:
    begin(core, ask("mixed"), steps=5)
    swap(core, new)
    mixed = finish_all(core)["mixed"]
    conversation = (*PROMPTS[1], *mixed.tokens, 40)
    following = run(core, ask("following", conversation))["following"]
    assert following.cached_tokens == 0
    assert following.tokens == new.greedy(conversation)


def test_a_flush_needs_an_idle_engine_and_forgets_prefixes(core: EngineCore) -> None:
    begin(core, ask("busy"), steps=1)
    with pytest.raises(CacheInUse, match="1 requests are running and 0 waiting"):
        core.flush()
    finish_all(core)
    core.flush()
    assert run(core, ask("again"))["again"].cached_tokens == 0


# --- swaps


def kept_across_swap(old: Model, new: Model) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a request that changes weights after 5 of its 12 tokens and keeps its cache."""
    models = old.reference, new.reference
    return tiny_models.reference_greedy_across_swap(*models, PROMPTS[1], num_before=5, num_after=7)


@pytest.mark.parametrize("paused", [False, True], ids=["between passes", "while paused in place"])
def test_a_swap_in_place_keeps_old_keys(core: EngineCore, old: Model, new: Model, paused: bool) -> None:
    begin(core, ask("r"), steps=5)
    if paused:
        core.pause(PauseMode.IN_PLACE)
    swap(core, new)
    core.resume()
    completion = finish_all(core)["r"]
    tokens, logprobs = kept_across_swap(old, new)
    assert list(completion.tokens) == tokens
    assert completion.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert spans(completion) == [("0", 0, 5), ("1", 5, 12)]
    assert completion.num_retractions == 0


def test_a_retracted_request_is_recomputed_with_new_weights(core: EngineCore, old: Model, new: Model) -> None:
    begin(core, ask("r"), steps=5)
    core.pause(PauseMode.RETRACT)
    swap(core, new)
    core.resume()
    completion = finish_all(core)["r"]
    conversation = (*PROMPTS[1], *old.greedy(PROMPTS[1], num_tokens=5))
    after = new.greedy(conversation, num_tokens=7)
    assert (*PROMPTS[1], *completion.tokens) == conversation + after
    expected = tiny_models.reference_logprobs(new.reference, conversation, after)
    assert completion.logprobs[5:] == pytest.approx(expected, abs=TOLERANCE)
    assert spans(completion) == [("0", 0, 5), ("1", 5, 12)]
    assert completion.num_retractions == 1


def test_the_two_ways_through_a_swap_are_told_apart_by_the_reference(old: Model, new: Model) -> None:
    """The control of the two tests above: keeping and recomputing old keys really differ."""
    kept, _ = kept_across_swap(old, new)
    assert tuple(kept[5:]) != new.greedy((*PROMPTS[1], *kept[:5]), num_tokens=7)


def test_a_retraction_without_a_swap_changes_nothing(core: EngineCore) -> None:
    request = ask("r", temperature=1.0, sampling_seed=3)
    undisturbed = run(core, request)["r"]
    begin(core, request, steps=6)
    core.pause(PauseMode.RETRACT)
    core.resume()
    completion = finish_all(core)["r"]
    assert completion.tokens == undisturbed.tokens
    assert completion.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)


def test_waiting_requests_see_only_the_version_they_start_under(core: EngineCore, new: Model) -> None:
    begin(core, *asks(5), steps=3)
    swap(core, new)
    done = finish_all(core)
    assert [span.version for rid in "04" for span in done[rid].spans] == ["0", "1", "1"]


def test_a_flush_at_a_swap_is_refused_while_paused_requests_need_it(core: EngineCore, new: Model) -> None:
    begin(core, ask("r"), steps=4)
    core.pause(PauseMode.IN_PLACE)
    with pytest.raises(CacheInUse, match="flush_cache: true needs an idle engine, 1 requests are running"):
        swap(core, new, flush_cache=True)
    core.resume()
    assert spans(finish_all(core)["r"]) == [("0", 0, 12)]


# --- pause, abort


def test_nothing_is_drawn_while_paused_and_new_requests_wait(core: EngineCore) -> None:
    begin(core, ask("running"), steps=2)
    core.pause(PauseMode.IN_PLACE)
    core.submit(ask("held", PROMPTS[2]))
    assert not core.has_work
    begin(core, steps=3)
    assert core.stats().num_generated_tokens == 2
    core.resume()
    assert set(finish_all(core)) == {"running", "held"}


def test_pausing_with_abort_ends_requests_with_what_they_have(core: EngineCore) -> None:
    begin(core, *asks(5), steps=3)
    ended = {completion.request.rid: completion for completion in core.pause(PauseMode.ABORT)}
    assert [len(ended[str(index)].tokens) for index in range(5)] == [3, 3, 3, 3, 0]
    assert {completion.finish.kind for completion in ended.values()} == {FinishKind.ABORT}
    assert ended["4"].finish.message == "Abort in waiting queue"
    assert core.num_live == 0


def test_an_abort_ends_only_what_it_names(core: EngineCore, old: Model) -> None:
    begin(core, *asks(4), steps=3)
    (aborted,) = core.abort(lambda request: request.rid == "2")
    assert (aborted.request.rid, len(aborted.tokens), len(aborted.logprobs)) == ("2", 3, 3)
    done = finish_all(core)
    assert sorted(done) == ["0", "1", "3"]
    assert done["3"].tokens == old.greedy(PROMPTS[3])


def test_nan_ends_the_request_and_spoils_nothing_after_it(core: EngineCore, old: Model) -> None:
    first, *others = old.weights.layers
    layer = replace(first, qkv=Linear(torch.full((64, 32), float("nan"))))
    swap(core, replace(old, weights=replace(old.weights, layers=(layer, *others))))
    broken = run(core, *(ask(str(index), PROMPTS[3]) for index in range(4)))
    assert all(completion.finish.faulty and completion.tokens == () for completion in broken.values())
    swap(core, old)
    # The same rows, and shorter prompts: what the broken request wrote lies behind theirs.
    for completion in run(core, *asks(4)).values():
        assert completion.tokens == old.greedy(completion.request.prompt)


def test_the_counters_tell_what_was_done(core: EngineCore, new: Model) -> None:
    run(core, *copies(4))
    swap(core, new)
    stats = core.stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_cached_tokens) == (48, 68, 51)
    assert (stats.num_completions, stats.num_swaps, stats.weight_version) == (4, 1, "1")
    assert (stats.num_running, stats.num_waiting, stats.tokens_per_s) == (0, 0, 0.0)

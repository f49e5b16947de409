"""The engine step by step: batching changes nothing, swaps and pauses do exactly what they say."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.errors import CacheInUse
from astraflow_engine.model_config import ModelConfig, load_model_config
from astraflow_engine.requests import (
    Completion,
    FinishKind,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    VersionSpan,
)
from astraflow_engine.scheduler import AdmissionLimits
from astraflow_engine.weights import Weights, load_weights
from astraflow_kit import failpoints
from support.manual_clock import ManualClock
from support.tiny_qwen import (
    EOS,
    load_reference,
    reference_greedy,
    reference_greedy_across_swap,
    reference_logprobs,
    save_tiny_qwen,
)

TOLERANCE = 1e-4
PROMPTS = [
    tuple(range(3 + i, 3 + i + length)) for i, length in enumerate([5, 17, 9, 30, 1, 12, 26, 3, 20, 8])
]


@dataclass(frozen=True)
class Model:
    """One checkpoint as the engine and as transformers see it."""

    weights: Weights
    reference: Qwen3ForCausalLM


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save_tiny_qwen(root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def config(folders: list[Path]) -> ModelConfig:
    return load_model_config(folders[0])


@pytest.fixture(scope="module")
def old(folders: list[Path], config: ModelConfig) -> Model:
    return Model(load_weights(folders[0], config=config), load_reference(folders[0]))


@pytest.fixture(scope="module")
def new(folders: list[Path], config: ModelConfig) -> Model:
    return Model(load_weights(folders[1], config=config), load_reference(folders[1]))


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def core(config: ModelConfig, old: Model) -> EngineCore:
    return make_core(config, old)


def make_core(config: ModelConfig, model: Model, *, num_slots: int = 4, seed: int = 0) -> EngineCore:
    limits = CoreLimits(
        num_slots=num_slots,
        capacity=96,
        admission=AdmissionLimits(max_waiting=64, max_prefill_tokens=200),
        pass_tokens=16,
    )
    return EngineCore(config, model.weights, limits=limits, seed=seed, version="0", clock=ManualClock())


def ask(rid: str, prompt: tuple[int, ...] = PROMPTS[1], **params: object) -> GenerateRequest:
    """A request that ignores end tokens unless told otherwise."""
    given: dict[str, object] = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(rid=rid, prompt=prompt, params=SamplingParams(**given), batch_rid=rid)  # type: ignore[arg-type]


def finish_all(core: EngineCore) -> dict[str, Completion]:
    """Step until nothing is left."""
    done: dict[str, Completion] = {}
    while core.has_work:
        done |= {completion.request.rid: completion for completion in core.step()}
    return done


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, Completion]:
    for request in requests:
        core.submit(request)
    return finish_all(core)


def step(core: EngineCore, times: int) -> None:
    for _ in range(times):
        assert core.step() == []


# --- agreement


def test_greedy_tokens_and_log_probs_agree_with_transformers(core: EngineCore, old: Model) -> None:
    done = run(core, *(ask(str(index), prompt) for index, prompt in enumerate(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        completion = done[str(index)]
        assert list(completion.tokens) == reference_greedy(old.reference, prompt, num_tokens=12)
        expected = reference_logprobs(old.reference, prompt, completion.tokens)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_log_probs_agree_with_transformers_at_their_temperature(
    core: EngineCore, old: Model, temperature: float
) -> None:
    done = run(core, *(ask(str(i), prompt, temperature=temperature) for i, prompt in enumerate(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        completion = done[str(index)]
        expected = reference_logprobs(old.reference, prompt, completion.tokens, temperature=temperature)
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


# --- batching


def test_continuous_batching_gives_what_one_by_one_gives(config: ModelConfig, old: Model) -> None:
    requests = [
        ask(str(i), prompt, temperature=1.0, sampling_seed=i, max_new_tokens=5 + 7 * (i % 4))
        for i, prompt in enumerate(PROMPTS * 3)
    ]
    together = run(make_core(config, old), *requests)
    for request in requests:
        alone = run(make_core(config, old, num_slots=1), request)[request.rid]
        assert together[request.rid].tokens == alone.tokens
        assert together[request.rid].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_requests_that_arrive_while_others_run_enter_freed_slots(core: EngineCore, old: Model) -> None:
    for index in range(4):
        core.submit(ask(str(index), PROMPTS[index], max_new_tokens=3 + 5 * index))
    step(core, 2)
    core.submit(ask("late", PROMPTS[5], max_new_tokens=6))
    done = finish_all(core)
    assert list(done) == ["0", "late", "1", "2", "3"]
    assert list(done["late"].tokens) == reference_greedy(old.reference, PROMPTS[5], num_tokens=6)


def test_slots_that_are_moved_together_keep_their_sequences(config: ModelConfig, old: Model) -> None:
    core = make_core(config, old, num_slots=8)
    lengths = [2, 3, 2, 4, 2, 3, 30, 28]
    done = run(core, *(ask(str(i), PROMPTS[i], max_new_tokens=n) for i, n in enumerate(lengths)))
    for index in (6, 7):
        expected = reference_greedy(old.reference, PROMPTS[index], num_tokens=lengths[index])
        assert list(done[str(index)].tokens) == expected


# --- seeds


def test_a_sampling_seed_repeats_and_another_server_seed_does_not(config: ModelConfig, old: Model) -> None:
    request = ask("r", temperature=1.0, sampling_seed=5, max_new_tokens=20)
    first, again = run(make_core(config, old), request), run(make_core(config, old), request)
    other = run(make_core(config, old, seed=1), request)
    assert first["r"].tokens == again["r"].tokens
    assert first["r"].tokens != other["r"].tokens


def test_samples_of_one_request_differ_and_the_first_is_the_request_alone(core: EngineCore) -> None:
    base = ask("r", temperature=1.0, sampling_seed=5, max_new_tokens=20)
    samples = [
        GenerateRequest(rid=f"r_{index}", prompt=base.prompt, params=base.params, sample_index=index)
        for index in range(3)
    ]
    done = run(core, *samples)
    assert len({completion.tokens for completion in done.values()}) == 3
    assert run(core, base)["r"].tokens == done["r_0"].tokens


def test_requests_without_a_seed_differ(core: EngineCore) -> None:
    done = run(core, *(ask(str(index), temperature=1.0, max_new_tokens=20) for index in range(3)))
    assert len({completion.tokens for completion in done.values()}) == 3


# --- ends


def test_an_end_token_ends_the_sequence_and_is_kept(core: EngineCore) -> None:
    greedy = run(core, ask("free", max_new_tokens=8))["free"].tokens
    stop = greedy[3]
    done = run(core, ask("stopped", max_new_tokens=8, ignore_eos=False, stop_token_ids=frozenset([stop])))
    completion = done["stopped"]
    assert completion.tokens == greedy[: greedy.index(stop) + 1]
    assert (completion.finish.kind, completion.finish.matched_token) == (FinishKind.STOP, stop)


def test_the_model_s_own_end_token_ends_unless_ignored(core: EngineCore) -> None:
    ending = [
        ask(f"e{i}", temperature=3.0, sampling_seed=i, ignore_eos=False, max_new_tokens=60) for i in range(8)
    ]
    going = [ask(f"g{i}", temperature=3.0, sampling_seed=i, max_new_tokens=60) for i in range(8)]
    done = run(core, *ending, *going)
    assert any(completion.finish.matched_token == EOS for completion in done.values())
    for index in range(8):
        ended, free = done[f"e{index}"].tokens, done[f"g{index}"].tokens
        assert len(free) == 60
        assert EOS not in ended[:-1]
        assert ended == free[: len(ended)]


def test_a_sequence_may_fill_its_slot_to_the_last_position(core: EngineCore, old: Model) -> None:
    prompt = tuple(3 + i % 90 for i in range(90))
    completion = run(core, ask("full", prompt, max_new_tokens=6))["full"]
    assert list(completion.tokens) == reference_greedy(old.reference, prompt, num_tokens=6)
    assert completion.finish.kind is FinishKind.LENGTH


# --- prefixes


def test_samples_of_one_prompt_are_prefilled_once(core: EngineCore, old: Model) -> None:
    done = run(core, *(ask(str(index)) for index in range(4)))
    assert [done[str(index)].cached_tokens for index in range(4)] == [0, 17, 17, 17]
    expected = reference_greedy(old.reference, PROMPTS[1], num_tokens=12)
    assert all(list(completion.tokens) == expected for completion in done.values())


def test_a_later_turn_reuses_prompt_and_answer_of_the_earlier_one(core: EngineCore, old: Model) -> None:
    first = run(core, ask("turn 1"))["turn 1"]
    conversation = (*PROMPTS[1], *first.tokens, 40, 41, 42)
    second = run(core, ask("turn 2", conversation))["turn 2"]
    # All but the last answer token went through the model in the first turn.
    assert second.cached_tokens == len(PROMPTS[1]) + len(first.tokens) - 1
    assert list(second.tokens) == reference_greedy(old.reference, conversation, num_tokens=12)


def test_branches_of_one_conversation_do_not_disturb_each_other(core: EngineCore, old: Model) -> None:
    first = run(core, ask("turn 1"))["turn 1"]
    conversation = (*PROMPTS[1], *first.tokens)
    done = run(core, *(ask(str(branch), (*conversation, 40 + branch)) for branch in range(4)))
    for branch in range(4):
        expected = reference_greedy(old.reference, (*conversation, 40 + branch), num_tokens=12)
        assert list(done[str(branch)].tokens) == expected
        assert done[str(branch)].cached_tokens >= len(conversation) - 1


def test_another_cache_space_shares_nothing(core: EngineCore) -> None:
    base = ask("a")
    other = GenerateRequest(rid="b", prompt=base.prompt, params=base.params, cache_space="elsewhere")
    done = run(core, base, other)
    assert [done[rid].cached_tokens for rid in "ab"] == [0, 0]


def test_prefixes_end_at_a_swap_and_the_new_weights_are_used_throughout(
    core: EngineCore, old: Model, new: Model
) -> None:
    run(core, ask("warm"))
    assert run(core, ask("reused"))["reused"].cached_tokens == len(PROMPTS[1]) - 1
    core.swap(new.weights, version="1", flush_cache=False)
    after = run(core, ask("after"))["after"]
    assert after.cached_tokens == 0
    assert list(after.tokens) == reference_greedy(new.reference, PROMPTS[1], num_tokens=12)
    assert after.spans == (VersionSpan(version="1", start=0, end=12),)


def test_a_row_that_lived_through_a_swap_is_never_reused(core: EngineCore, new: Model) -> None:
    core.submit(ask("mixed"))
    step(core, 5)
    core.swap(new.weights, version="1", flush_cache=False)
    mixed = finish_all(core)["mixed"]
    conversation = (*PROMPTS[1], *mixed.tokens, 40)
    following = run(core, ask("following", conversation))["following"]
    assert following.cached_tokens == 0
    assert list(following.tokens) == reference_greedy(new.reference, conversation, num_tokens=12)


def test_a_flush_needs_an_idle_engine_and_forgets_prefixes(core: EngineCore) -> None:
    core.submit(ask("busy"))
    step(core, 1)
    with pytest.raises(CacheInUse, match="1 requests are running and 0 waiting"):
        core.flush()
    finish_all(core)
    core.flush()
    assert run(core, ask("again"))["again"].cached_tokens == 0


# --- swaps


@pytest.mark.parametrize("paused", [False, True], ids=["between passes", "while paused in place"])
def test_a_swap_in_place_keeps_old_keys_and_names_both_versions(
    core: EngineCore, old: Model, new: Model, paused: bool
) -> None:
    core.submit(ask("r"))
    step(core, 5)
    if paused:
        core.pause(PauseMode.IN_PLACE)
    core.swap(new.weights, version="1", flush_cache=False)
    core.resume()
    completion = finish_all(core)["r"]
    tokens, logprobs = reference_greedy_across_swap(
        old.reference, new.reference, PROMPTS[1], num_before=5, num_after=7
    )
    assert list(completion.tokens) == tokens
    assert completion.logprobs == pytest.approx(logprobs, abs=TOLERANCE)
    assert completion.spans == (
        VersionSpan(version="0", start=0, end=5),
        VersionSpan(version="1", start=5, end=12),
    )
    assert completion.num_retractions == 0


def test_a_retracted_request_is_recomputed_under_the_new_weights(
    core: EngineCore, old: Model, new: Model
) -> None:
    core.submit(ask("r"))
    step(core, 5)
    core.pause(PauseMode.RETRACT)
    core.swap(new.weights, version="1", flush_cache=False)
    core.resume()
    completion = finish_all(core)["r"]
    before = reference_greedy(old.reference, PROMPTS[1], num_tokens=5)
    after = reference_greedy(new.reference, (*PROMPTS[1], *before), num_tokens=7)
    assert list(completion.tokens) == before + after
    expected = reference_logprobs(new.reference, (*PROMPTS[1], *before), after)
    assert completion.logprobs[5:] == pytest.approx(expected, abs=TOLERANCE)
    assert [(span.version, span.start, span.end) for span in completion.spans] == [("0", 0, 5), ("1", 5, 12)]
    assert completion.num_retractions == 1


def test_the_two_ways_through_a_swap_are_told_apart_by_the_reference(old: Model, new: Model) -> None:
    """The control of the two tests above: keeping and recomputing old keys really differ."""
    kept, _ = reference_greedy_across_swap(
        old.reference, new.reference, PROMPTS[1], num_before=5, num_after=7
    )
    assert kept[5:] != reference_greedy(new.reference, (*PROMPTS[1], *kept[:5]), num_tokens=7)


def test_a_retraction_without_a_swap_changes_nothing(core: EngineCore) -> None:
    request = ask("r", temperature=1.0, sampling_seed=3)
    undisturbed = run(core, request)["r"]
    core.submit(request)
    step(core, 6)
    core.pause(PauseMode.RETRACT)
    core.resume()
    completion = finish_all(core)["r"]
    assert completion.tokens == undisturbed.tokens
    assert completion.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)


def test_waiting_requests_see_only_the_version_they_start_under(core: EngineCore, new: Model) -> None:
    for index in range(5):
        core.submit(ask(str(index), PROMPTS[index]))
    step(core, 3)
    core.swap(new.weights, version="1", flush_cache=False)
    done = finish_all(core)
    assert [span.version for span in done["0"].spans] == ["0", "1"]
    assert [span.version for span in done["4"].spans] == ["1"]


def test_a_cache_flush_at_a_swap_is_refused_while_paused_requests_need_it(
    core: EngineCore, new: Model
) -> None:
    core.submit(ask("r"))
    step(core, 4)
    core.pause(PauseMode.IN_PLACE)
    with pytest.raises(CacheInUse, match="flush_cache: true needs an idle engine, 1 requests are running"):
        core.swap(new.weights, version="1", flush_cache=True)
    core.resume()
    assert finish_all(core)["r"].spans == (VersionSpan(version="0", start=0, end=12),)


def test_a_swap_that_fails_before_it_begins_leaves_the_old_weights(
    core: EngineCore, old: Model, new: Model
) -> None:
    failpoints.arm("engine.before_swap=raise")
    try:
        with pytest.raises(failpoints.FailpointRaised):
            core.swap(new.weights, version="1", flush_cache=True)
    finally:
        failpoints.arm("")
    completion = run(core, ask("r"))["r"]
    assert list(completion.tokens) == reference_greedy(old.reference, PROMPTS[1], num_tokens=12)
    assert core.stats().weight_version == "0"


# --- pause, abort


def test_nothing_is_drawn_while_paused_and_new_requests_wait(core: EngineCore) -> None:
    core.submit(ask("running"))
    step(core, 2)
    core.pause(PauseMode.IN_PLACE)
    core.submit(ask("held", PROMPTS[2]))
    assert not core.has_work
    step(core, 3)
    assert core.stats().num_generated_tokens == 2
    core.resume()
    assert set(finish_all(core)) == {"running", "held"}


def test_pausing_with_abort_ends_requests_with_what_they_have(core: EngineCore) -> None:
    for index in range(5):
        core.submit(ask(str(index), PROMPTS[index]))
    step(core, 3)
    ended = {completion.request.rid: completion for completion in core.pause(PauseMode.ABORT)}
    assert [len(ended[str(index)].tokens) for index in range(5)] == [3, 3, 3, 3, 0]
    assert {completion.finish.kind for completion in ended.values()} == {FinishKind.ABORT}
    assert ended["4"].finish.message == "Abort in waiting queue"
    assert core.num_live == 0


def test_an_abort_ends_only_what_it_names(core: EngineCore, old: Model) -> None:
    for index in range(4):
        core.submit(ask(str(index), PROMPTS[index]))
    step(core, 3)
    (aborted,) = core.abort(lambda request: request.rid == "2")
    assert (aborted.request.rid, len(aborted.tokens), len(aborted.logprobs)) == ("2", 3, 3)
    done = finish_all(core)
    assert sorted(done) == ["0", "1", "3"]
    assert list(done["3"].tokens) == reference_greedy(old.reference, PROMPTS[3], num_tokens=12)


def test_numbers_that_are_not_finite_end_the_request_and_spoil_nothing_after_it(
    core: EngineCore, old: Model
) -> None:
    layer = replace(old.weights.layers[0], qkv_DC=torch.full_like(old.weights.layers[0].qkv_DC, float("nan")))
    core.swap(
        replace(old.weights, layers=(layer, *old.weights.layers[1:])), version="broken", flush_cache=False
    )
    broken = run(core, *(ask(str(index), PROMPTS[3]) for index in range(4)))
    assert all(completion.finish.faulty and completion.tokens == () for completion in broken.values())
    core.swap(old.weights, version="sound", flush_cache=False)
    # The same rows, and shorter prompts: what the broken request wrote lies behind theirs.
    sound = run(core, *(ask(str(index), PROMPTS[index]) for index in range(4)))
    for index in range(4):
        expected = reference_greedy(old.reference, PROMPTS[index], num_tokens=12)
        assert list(sound[str(index)].tokens) == expected


def test_the_counters_tell_what_was_done(core: EngineCore, new: Model) -> None:
    run(core, *(ask(str(index)) for index in range(4)))
    core.swap(new.weights, version="1", flush_cache=False)
    stats = core.stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_cached_tokens) == (48, 68, 51)
    assert (stats.num_completions, stats.num_swaps, stats.weight_version) == (4, 1, "1")
    assert (stats.num_running, stats.num_waiting, stats.tokens_per_s) == (0, 0, 0.0)

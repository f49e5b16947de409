"""The rule by which a node takes as many episodes as keep its engines busy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_raas.engine.base import EngineLoad
from astraflow_raas.work.allowance import Allowance, EngineUse, allow

AGES_S = 1_000.0
"""So long after the sample before that nothing else counts."""


def used(
    *,
    slots: int = 64,
    running: float = 0,
    waiting: float = 0,
    kv_usage: float | None = 0.1,
    tokens_per_s: float = 1e6,
    calls: int | None = None,
    episodes: int = 0,
    tokens_per_call: float = 100.0,
) -> EngineUse:
    """A use of these means."""
    use = EngineUse(slots=slots)
    load = EngineLoad(running=running, waiting=waiting, kv_usage=kv_usage, tokens_per_s=tokens_per_s)
    calls = int(running + waiting) if calls is None else calls
    use.note(load, calls=calls, episodes=episodes, elapsed_s=AGES_S, tokens_per_call=tokens_per_call)
    return use


def allowed(*uses: EngineUse, most: int = 512, group_size: int = 8, call_s: float = 30.0) -> tuple[int, str]:
    allowance = allow(uses, most_episodes=most, group_size=group_size, call_s=call_s)
    return allowance.episodes, allowance.bounded_by


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        pytest.param(
            used(), (80, "engine_slots"), id="idle: its places and a quarter more, before anything is known"
        ),
        pytest.param(used(running=64, calls=80, episodes=80), (80, "engine_slots"), id="full"),
        pytest.param(
            used(running=32, episodes=64), (160, "engine_slots"), id="half of an episode is no call"
        ),
        pytest.param(used(running=2, episodes=64), (512, "recipe"), id="episodes that wait elsewhere"),
        pytest.param(
            used(running=64, calls=128, episodes=64), (40, "engine_slots"), id="two calls an episode"
        ),
        pytest.param(used(running=40, kv_usage=0.9, episodes=40), (56, "engine_kv"), id="memory for 40"),
        pytest.param(
            used(running=40, kv_usage=None, episodes=40), (80, "engine_slots"), id="memory is not told"
        ),
        pytest.param(
            used(running=64, episodes=64, tokens_per_s=100, tokens_per_call=300),
            (16, "tokens_per_s"),
            id="ten answers in half a minute",
        ),
        pytest.param(
            used(running=64, episodes=64, tokens_per_s=100, tokens_per_call=0),
            (80, "engine_slots"),
            id="no answer yet",
        ),
        pytest.param(
            used(running=64, episodes=64, tokens_per_s=0),
            (80, "engine_slots"),
            id="an engine that tells no speed",
        ),
        pytest.param(
            used(running=1, kv_usage=1.0, episodes=1, tokens_per_s=0.001),
            (8, "tokens_per_s"),
            id="one group at least",
        ),
        pytest.param(used(slots=4096), (512, "recipe"), id="never more than the recipe says"),
    ],
)
def test_a_node_runs_as_many_episodes_as_its_engine_can(use: EngineUse, expected: tuple[int, str]) -> None:
    assert allowed(use) == expected


def test_the_fullest_engine_decides_and_a_node_without_one_has_the_recipes_bound() -> None:
    assert allowed(used(slots=64), used(slots=16)) == (24, "engine_slots")
    assert allowed() == (512, "recipe")
    assert allowed(most=20) == (20, "recipe")


def test_an_engines_own_count_says_nothing_of_memory_and_speed() -> None:
    use = used(running=64, kv_usage=0.99, tokens_per_s=0.1, episodes=64)
    use.fault = "no report"
    assert allowed(use) == (80, "engine_slots")


def test_one_sample_among_many_moves_the_bound_a_little() -> None:
    use = used(running=64, episodes=64)
    quiet = EngineLoad(running=0, waiting=0, kv_usage=0.0, tokens_per_s=0.0)
    use.note(quiet, calls=0, episodes=64, elapsed_s=1.0, tokens_per_call=100.0)
    assert allowed(use) == (96, "engine_slots")


counts = st.integers(0, 5_000)


@given(
    slots=st.integers(1, 4_096),
    running=counts,
    waiting=counts,
    kv_usage=st.none() | st.floats(0, 1),
    tokens_per_s=st.floats(0, 1e7),
    calls=counts,
    episodes=counts,
    tokens_per_call=st.floats(0, 1e6),
    most=st.integers(1, 10_000),
    group_size=st.integers(1, 64),
    call_s=st.floats(0.1, 1e5),
)
def test_the_allowance_is_whole_groups_within_the_recipes_bound_whatever_is_measured(
    most: int, group_size: int, call_s: float, **load: object
) -> None:
    use = used(**load)  # type: ignore[arg-type]
    found = allow([use], most_episodes=most, group_size=group_size, call_s=call_s)
    bound = max(most, group_size)
    assert group_size <= found.episodes <= bound
    assert found.episodes % group_size == 0 or found.episodes == bound
    assert found == allow(
        [use, EngineUse(slots=10**6)], most_episodes=most, group_size=group_size, call_s=call_s
    )
    assert isinstance(found, Allowance)

"""Mixing sources."""

from collections import Counter
from collections.abc import Sequence

import pytest

from astraflow.plugins import PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.mix_sources import MixSources


def drawn(sources: Sequence[str], *, start: int = 0) -> list[TaskSpec]:
    return [TaskSpec(f"t{start + number}", (), source=source) for number, source in enumerate(sources)]


def test_a_source_ahead_of_its_share_is_skipped() -> None:
    curator = MixSources(PluginState(), weights={"a": 3, "b": 1})
    # Taken while n ≤ share · (N + 1): a 0 ≤ 0.75, b 0 ≤ 0.5, a 1 ≤ 2.25, b 1 ≤ 1, a 2 ≤ 3.75, b 2 > 1.5, a 3 ≤ 4.5,
    # b 2 > 1.75, a 4 ≤ 5.25, b 2 ≤ 2.
    chosen = curator.propose(drawn("ababababab"))
    assert [task.task_id for task in chosen] == ["t0", "t1", "t2", "t3", "t4", "t6", "t8", "t9"]


def test_in_the_long_run_the_shares_are_the_weights() -> None:
    curator = MixSources(PluginState(), weights={"a": 0.7, "b": 0.2, "c": 0.1})
    chosen: Counter[str] = Counter()
    for call in range(200):
        chosen.update(task.source for task in curator.propose(drawn("abcabcabcabc", start=12 * call)))
    assert {name: round(number / chosen.total(), 2) for name, number in chosen.items()} == {
        "a": 0.7,
        "b": 0.2,
        "c": 0.1,
    }


def test_a_quota_ends_a_source_and_the_others_share_the_rest() -> None:
    curator = MixSources(PluginState(), weights={"a": 1, "b": 1, "c": 2}, quotas={"a": 2})
    chosen = Counter(
        task.source for call in range(20) for task in curator.propose(drawn("abcabc", start=6 * call))
    )
    assert chosen["a"] == 2
    assert chosen["c"] == pytest.approx(2 * chosen["b"], abs=3)


def test_sources_without_a_weight_are_skipped() -> None:
    assert MixSources(PluginState(), weights={"a": 1}).propose(drawn("xyx")) == []


def test_a_source_that_ended_holds_up_nothing() -> None:
    curator = MixSources(PluginState(), weights={"a": 1, "b": 9}, absent_after=5)
    # 1 of a is taken, the second is ahead of its share; after 5 draws without b, a is all there is.
    chosen = curator.propose(drawn("aaaaaaaa"))
    assert [task.task_id for task in chosen] == ["t0", "t5", "t6", "t7"]


def test_a_proposal_that_is_repeated_counts_once() -> None:
    state = PluginState()
    curator = MixSources(state, weights={"a": 1}, quotas={"a": 6})
    for _ in range(3):
        assert len(curator.propose(drawn("aaaa"))) == 4
    assert len(curator.propose(drawn("aaaa", start=4))) == 2


@pytest.mark.parametrize("settings", [{"weights": {}}, {"weights": {"a": 1}, "quotas": {"b": 3}}])
def test_settings_that_fit_no_source_are_refused(settings: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ValueError, match="weigh at least one source"):
        MixSources(PluginState(), **settings)  # type: ignore[arg-type]

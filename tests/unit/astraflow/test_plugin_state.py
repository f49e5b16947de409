"""The state of a plug-in: a bounded mapping that knows what changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow import plugin_state
from astraflow.plugin_state import MAX_VALUE_BYTES, PluginState

KEYS = st.text("abc", min_size=1, max_size=2)
WRITES = st.lists(st.tuples(KEYS, st.none() | st.integers() | st.lists(st.text())), max_size=20)


@given(WRITES, WRITES)
def test_saving_the_changes_of_each_call_keeps_the_same_content(before: list, after: list) -> None:
    state, stored, model = PluginState(), {}, {}
    for writes in (before, after):
        for key, value in writes:
            if value is None and key in state:
                del state[key]
                del model[key]
            elif value is not None:
                state[key] = model[key] = value
        stored = {key: value for key, value in (stored | state.changes()).items() if value}
        state.saved()
        assert state.changes() == {}
        assert dict(state) == dict(PluginState(stored)) == model


def test_what_is_read_is_a_copy() -> None:
    state = PluginState()
    state["seen"] = [1]
    state["seen"].append(2)
    assert state["seen"] == [1]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("", 1, "has 0 bytes"),
        ("k" * 257, 1, "keys of 1 to 256 bytes"),
        ("k", "x" * 65_536, "split the value over several keys"),
        ("k", object(), "not JSON serializable"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(key: str, value: object, problem: str) -> None:
    state = PluginState()
    with pytest.raises((ValueError, TypeError), match=problem):
        state[key] = value
    assert (dict(state), state.changes()) == ({}, {})


def test_a_full_state_says_so_and_takes_more_after_a_key_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_state, "MAX_STATE_BYTES", 10)
    state = PluginState({"a": b"12345"})
    with pytest.raises(ValueError, match="would hold 12 bytes, at most 10; delete keys"):
        state["b"] = 12345
    del state["a"]
    state["b"] = 12345
    assert state.changes() == {"a": b"", "b": b"12345"}


def test_changes_of_a_copy_are_taken_within_the_bounds() -> None:
    state, copy = PluginState(), PluginState()
    copy["a"], copy["b"] = 1, 2
    state.merge(copy.changes())
    copy.saved()
    del copy["a"]
    state.merge(copy.changes())
    assert dict(state) == dict(copy) == {"b": 2}
    assert state.changes() == {"a": b"", "b": b"2"}
    with pytest.raises(ValueError, match="split the value"):
        state.merge({"c": bytes(MAX_VALUE_BYTES + 1)})
    assert dict(state) == {"b": 2}

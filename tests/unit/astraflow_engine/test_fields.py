"""Reading JSON members: typed, bounded, null as absent."""

import pytest

from astraflow_engine import fields
from astraflow_engine.errors import InvalidRequest


def test_null_members_count_as_absent() -> None:
    assert fields.json_object({"a": None, "b": 0}, name="it") == {"b": 0}


@pytest.mark.parametrize("value", [[], "x", 3, None])
def test_only_an_object_is_an_object(value: object) -> None:
    with pytest.raises(InvalidRequest, match="expected a JSON object"):
        fields.json_object(value, name="it")


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 11])
def test_an_integer_is_neither_a_boolean_nor_out_of_bounds(value: object) -> None:
    with pytest.raises(InvalidRequest, match="expected an integer from 0 to 10"):
        fields.integer({"n": value}, "n", default=0, low=0, high=10)


@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -0.5])
def test_a_number_is_finite_and_at_least_its_bound(value: object) -> None:
    with pytest.raises(InvalidRequest, match="expected at least 0"):
        fields.number({"x": value}, "x", default=0.0, low=0.0, bound="at least 0")


def test_long_values_are_shortened_in_messages() -> None:
    shown = fields.shown(list(range(1_000)))
    assert len(shown) < 80
    assert shown.endswith("(list)")


def test_an_unknown_member_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown field 'temprature'\. Did you mean 'temperature'\?"):
        fields.refuse_unknown({"temprature": 1}, {"temperature", "top_p"}, where="sampling_params")

"""What the bodies of `test_api.py` do not show about reading JSON members."""

import pytest

from astraflow_engine import errors, fields


@pytest.mark.parametrize("value", [[], "x", 3, None])
def test_only_an_object_is_an_object(value: object) -> None:
    with pytest.raises(errors.InvalidRequest, match="expected a JSON object"):
        fields.json_object(value, name="it")


def test_long_values_are_shortened_in_messages() -> None:
    shown = fields.shown(list(range(1_000)))
    assert len(shown) < 80
    assert shown.endswith("(list)")

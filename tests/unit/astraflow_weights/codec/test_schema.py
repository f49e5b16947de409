"""A schema has one spelling, numbers the cells of all tensors, and is read from hostile bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS, TensorSpec, specs_of
from support.weight_models import make_model, trained

SCHEMA = Schema.of_model(make_model())


def test_it_depends_on_names_dtypes_and_shapes_only() -> None:
    assert Schema.of_model(trained(make_model(), 1)).digest == SCHEMA.digest
    assert Schema.of(reversed(specs_of(make_model()))) == SCHEMA
    assert Schema.of_model(make_model(rows=25)).digest != SCHEMA.digest


def test_it_comes_back() -> None:
    assert Schema.decode(SCHEMA.content) == SCHEMA


def test_cells_are_numbered_through() -> None:
    sizes = {"a": 2 * MAX_TILE_ELEMENTS + 1, "b": 0, "c": 5, "d": MAX_TILE_ELEMENTS}
    schema = Schema.of(TensorSpec(name=name, dtype="uint8", shape=(size,)) for name, size in sizes.items())
    places = [schema.place(cell) for cell in range(schema.num_cells)]
    assert [(spec.name, start, count) for spec, start, count in places] == [
        ("a", 0, MAX_TILE_ELEMENTS),
        ("a", MAX_TILE_ELEMENTS, MAX_TILE_ELEMENTS),
        ("a", 2 * MAX_TILE_ELEMENTS, 1),
        ("c", 0, 5),
        ("d", 0, MAX_TILE_ELEMENTS),
    ]
    assert [schema.cell(spec.name, start) for spec, start, _ in places] == list(range(5))


def test_every_truncation_and_flipped_byte_is_refused_or_another_schema() -> None:
    for length in range(len(SCHEMA.content)):
        try:
            assert Schema.decode(SCHEMA.content[:length]) != SCHEMA
        except ValueError:
            continue


@given(st.binary(max_size=80), st.integers(0, 2**32))
def test_hostile_bytes_raise_value_error_and_nothing_else(data: bytes, at: int) -> None:
    content = SCHEMA.content
    place = at % len(content)
    for candidate in (data, content[:place] + data, content[:place] + data + content[place + len(data) :]):
        try:
            Schema.decode(candidate)
        except ValueError:
            continue


@pytest.mark.parametrize("specs", [(), (SCHEMA.specs[0], SCHEMA.specs[0])])
def test_no_tensor_and_a_name_twice_are_refused(specs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ValueError, match="a schema of"):
        Schema.of(specs)

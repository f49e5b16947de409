"""A salted part is the same content under another name."""

import pytest

from astraflow_weights.codec import Schema, decode_snapshot, digest, encode_delta, encode_snapshot
from astraflow_weights.codec.parts import reader, writer
from support.weight_models import applied, make_model, same_model, trained

BASE = make_model()
TARGET = trained(BASE, 1)
SCHEMA = Schema.of_model(BASE)


@pytest.mark.parametrize("salt", [1, 127, 128, 2**32 - 1])
def test_a_salted_part_holds_the_same_and_has_another_sha256(salt: int) -> None:
    parts = encode_delta(BASE, TARGET, context=False)
    others = [writer.salted(part, salt=salt) for part in parts]
    assert {digest.sha256(part) for part in parts}.isdisjoint(digest.sha256(part) for part in others)
    assert same_model(applied(BASE, others), TARGET)


def test_salted_and_plain_parts_of_one_set_belong_together() -> None:
    first, *others = encode_snapshot(TARGET, part_bytes=2000)
    assert others, "the set must have several parts"
    assert same_model(decode_snapshot([writer.salted(first, salt=1), *others], schema=SCHEMA), TARGET)


def test_salt_replaces_salt() -> None:
    (part,) = encode_snapshot(TARGET)
    once = writer.salted(part, salt=1)
    assert writer.salted(writer.salted(part, salt=9), salt=1) == once
    assert reader.open_part(once).tiles(SCHEMA) == reader.open_part(part).tiles(SCHEMA)

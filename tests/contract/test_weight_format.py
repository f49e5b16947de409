"""The bytes of parts and log entries, as files: made by this release, to be read by every later one.

A vector never changes once the format is released. docs/weight-format.md tells how to read them, and a reader written
from it alone does.
"""

import json
from collections.abc import Sequence

import numpy as np
import pytest

from astraflow_weights.codec import apply_delta, decode_snapshot, kernel
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensors import Array, Model, flat_unsigned
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.manifest import decode_entry, encode_entry
from support import spec_reader, weight_vectors
from support.source_tree import REPOSITORY
from support.weight_models import copied, same_model
from support.weight_vectors import VECTORS, Vector, stored

vectors = pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS.keys())


def parts_of(vector: Vector) -> list[bytes]:
    return [stored(name) for name in vector.files]


def decoded(vector: Vector) -> Model:
    parts = parts_of(vector)
    if vector.base is None:
        return decode_snapshot(parts, schema=vector.schema)
    model = copied(vector.base)
    apply_delta(model, parts)
    return model


@vectors
@pytest.mark.parametrize("isa", [None, *Isa], ids=str)
def test_every_vector_decodes_to_its_model(vector: Vector, isa: Isa | None) -> None:
    with kernel.using(isa):
        assert same_model(decoded(vector), vector.target)


@vectors
@pytest.mark.parametrize("isa", [None, *Isa], ids=str)
def test_every_vector_is_what_the_encoder_makes(vector: Vector, isa: Isa | None) -> None:
    """Frames depend on the release of zstandard that made them, so vectors with some are only read."""
    with kernel.using(isa):
        made = list(vector.make())
    if vector.holds_frames:
        assert len(made) == len(vector.files)
    else:
        assert made == parts_of(vector)


@vectors
def test_a_reader_written_from_the_page_reads_every_vector(vector: Vector) -> None:
    base = None if vector.base is None else patterns(vector.base)
    found = spec_reader.read_set(vector.schema.content, parts_of(vector), base)
    assert found == patterns(vector.target)


def patterns(model: Model) -> spec_reader.Bits:
    return {name: flat_unsigned(array).tolist() for name, array in model.items()}


def test_the_models_of_the_vectors_stand_beside_them() -> None:
    written = json.loads((weight_vectors.FOLDER / "contents.json").read_text())
    assert written == json.loads(json.dumps(weight_vectors.contents()))
    runs = written["delta_tiled"]["base"]["a"]["runs"]
    assert unfolded(runs) == weight_vectors.TILED["a"].tolist()


def unfolded(runs: Sequence[Sequence[int]]) -> list[int]:
    counts, values = zip(*runs, strict=True)
    bits: Array = np.repeat(values, counts)
    return list(bits.tolist())


def test_the_vectors_hold_every_codec_and_form() -> None:
    opened = {name: [open_part(part) for part in parts_of(vector)] for name, vector in VECTORS.items()}
    found = {codec for parts in opened.values() for part in parts for codec in part.codecs}
    assert found == set(TileCodec)
    tiled = opened["delta_tiled"]
    assert [(part.head.writer, part.head.number, part.head.is_last) for part in tiled] == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, False),
        (1, 1, True),
    ]
    assert any(part.lengths.any() for part in tiled), "a tile that does not fill its cell"
    (experts,) = opened["delta_experts"]
    assert experts.head.table_bytes > experts.head.table_end - 64, "a table that is stored as a frame"


@pytest.mark.parametrize("name", weight_vectors.SINGLE)
def test_single_objects_are_what_is_written(name: str) -> None:
    assert weight_vectors.SINGLE[name]().hex() == stored(name).hex()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("manifest.hex", weight_vectors.MANIFEST),
        ("manifest_by_key.hex", weight_vectors.following()),
        ("fence.hex", weight_vectors.FENCE),
    ],
)
def test_entries_are_read(name: str, entry: entries.Entry) -> None:
    assert decode_entry(stored(name)) == entry
    assert encode_entry(entry) == stored(name)


def test_the_page_names_every_vector() -> None:
    page = (REPOSITORY / "docs" / "weight-format.md").read_text()
    files = sorted(path.name for path in weight_vectors.FOLDER.iterdir())
    assert [name for name in files if f"`{name}`" not in page] == []
    assert "python tests/support/weight_vectors.py" in page

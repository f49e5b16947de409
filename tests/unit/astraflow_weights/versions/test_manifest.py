"""Entries come back as they were, and damaged or contradictory ones are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from astraflow.errors import IncompatibleError
from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.probe import ProbeAnswer
from astraflow_weights.versions.references.digest_table import KeyRef
from support.log_records import ROOT, added_path, fence, manifest
from support.weight_models import KEYS


def ref(content: bytes) -> entries.PartRef:
    return entries.PartRef(key=KEYS.part(content.hex()), size_bytes=len(content), sha256=sha256(content))


MANIFEST = manifest(
    5,
    version=3,
    epoch=2,
    step=40,
    snapshot=(ref(b"s0"), ref(b"s1")),
    deltas=(entries.DeltaRef(base_version=2, parts=(ref(b"d"),)),),
    assets=(entries.Asset(file_name="config.json", blob=ref(b"{}")),),
    num_changed=17,
    learning_rate=1e-6,
    created_time_s=1_700_000_000.25,
)
ANSWER = ProbeAnswer(prompt_ids=(5, 1), token_ids=(7, 0), logprobs=(-0.1, -2.5), margins=(0.0, 1 / 3))
PROBE = (ANSWER, replace(ANSWER, prompt_ids=(9,)))
FENCE = replace(fence(0, epoch=4), created_time_s=1_700_000_000.5)


@pytest.mark.parametrize(
    "entry",
    [
        MANIFEST,
        replace(MANIFEST, snapshot=None),
        replace(MANIFEST, probe=PROBE),
        replace(MANIFEST, deltas=(), learning_rate=None, assets=()),
        replace(MANIFEST, version=0, parent_version=None, deltas=()),
        FENCE,
        replace(FENCE, previous_epoch=0, sequence=9),
    ],
)
def test_an_entry_comes_back_as_it_was(entry: entries.Entry) -> None:
    assert entries.decode_entry(entries.encode_entry(entry)) == entry


def test_every_truncation_is_detected() -> None:
    data = entries.encode_entry(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(CorruptManifest):
            entries.decode_entry(data[:length])


@pytest.mark.parametrize("found", [1, 3], ids=["older", "newer"])
def test_another_schema_is_refused_with_the_remedy(found: int) -> None:
    content = manifest_pb2.Entry(schema_version=found).SerializeToString()
    with pytest.raises(
        IncompatibleError, match=rf"schema version {found}, astraflow \S+ reads 2; .* new run$"
    ):
        entries.decode_entry(content + b"\x7a\x20" + sha256(content))


def test_an_entry_that_is_neither_is_refused() -> None:
    content = manifest_pb2.Entry(schema_version=2).SerializeToString()
    with pytest.raises(CorruptManifest, match="neither a manifest nor a fence"):
        entries.decode_entry(content + b"\x7a\x20" + sha256(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"snapshot": None, "deltas": ()}, "neither a snapshot nor a delta"),
        ({"deltas": (entries.DeltaRef(base_version=3, parts=(ref(b"d"),)),)}, "the version itself or later"),
        ({"deltas": MANIFEST.deltas * 2}, "or repeats"),
        ({"parent_version": 1}, "follows version 1, not 2"),
        ({"parent_version": None}, "follows version None, not 2"),
        ({"assets": MANIFEST.assets * 2}, "asset names repeat"),
        (
            {"table": replace(MANIFEST.table, key=KeyRef(sequence=5, sha256=ROOT))},
            "key manifest is not before",
        ),
        ({"num_changed": 10**9}, "counts 1000000000 changes"),
        ({"learning_rate": float("nan")}, "not a number"),
    ],
)
def test_a_contradictory_manifest_is_never_written(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entries.encode_entry(replace(MANIFEST, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        lambda made: made.ClearField("writer_nonce"),
        lambda made: setattr(made.snapshot.parts[0], "sha256", b"short"),
        lambda made: setattr(made.snapshot.parts[0], "key", "../../etc/passwd"),
        lambda made: setattr(made.assets[0], "file_name", "../config.json"),
        lambda made: made.ClearField("schema_sha256"),
        lambda made: setattr(made.digests, "digests", b"of another size"),
        lambda made: made.digests.ClearField("digests"),
        lambda made: made.digests.skipped_tensors.append(0),
        lambda made: setattr(made.digests.key, "sha256", b"short"),
        lambda made: made.deltas[0].ClearField("parts"),
        lambda made: setattr(made, "run_id", ".."),
    ],
)
def test_a_sealed_manifest_with_a_bad_field_is_refused(damage: object) -> None:
    message = manifest_pb2.Entry.FromString(entries.encode_entry(MANIFEST))
    message.ClearField("seal")
    damage(message.manifest)  # type: ignore[operator]
    content = message.SerializeToString()
    with pytest.raises(CorruptManifest, match="contradicts itself"):
        entries.decode_entry(content + b"\x7a\x20" + sha256(content))


PARTS = (ref(b"m0"), ref(b"m1"))
ADDED = replace(added_path(16, base=8, size_bytes=1), parts=PARTS, created_time_s=1_700_000_000.75)


@pytest.mark.parametrize("path", [ADDED, replace(ADDED, base_version=0), replace(ADDED, base_version=None)])
def test_an_added_path_comes_back_as_it_was(path: entries.AddedPath) -> None:
    assert entries.decode_path(entries.encode_path(path)) == path


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        pytest.param(entries.encode_entry(MANIFEST), entries.decode_entry, id="manifest"),
        pytest.param(entries.encode_entry(FENCE), entries.decode_entry, id="fence"),
        pytest.param(entries.encode_path(ADDED), entries.decode_path, id="added path"),
    ],
)
def test_every_flipped_bit_is_detected(data: bytes, decode: Callable[[bytes], object]) -> None:
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptManifest):
            decode(bytes(flipped))


def test_a_path_is_no_entry_and_an_entry_no_path() -> None:
    with pytest.raises(CorruptManifest, match="neither a manifest nor a fence"):
        entries.decode_entry(entries.encode_path(ADDED))
    with pytest.raises(CorruptManifest, match="is not an added path"):
        entries.decode_path(entries.encode_entry(FENCE))


def test_a_path_that_leads_nowhere_is_not_written() -> None:
    with pytest.raises(ValueError, match="to version 16 starts from version 16"):
        entries.encode_path(replace(ADDED, base_version=16))

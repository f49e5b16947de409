"""A blob reference pins bytes under the run's own prefix, and says what is wrong with it otherwise."""

import hashlib

import pytest

from astraflow.blobs import blob_prefix, blob_problem, blob_ref
from astraflow.rollout.v1 import blob_pb2

PREFIX = blob_prefix("s3://bucket/weights", "run-1")
CONTENT = b"routing"


def good() -> blob_pb2.BlobRef:
    return blob_ref(CONTENT, name="routing/t-1", prefix=PREFIX, media_type="application/octet-stream")


@pytest.mark.parametrize("store_uri", ["s3://bucket/weights", "s3://bucket/weights/"])
def test_blobs_lie_under_the_run(store_uri: str) -> None:
    assert blob_prefix(store_uri, "run-1") == "s3://bucket/weights/run-1/blobs/"


def test_a_reference_pins_size_and_digest() -> None:
    ref = good()
    assert ref.uri == "s3://bucket/weights/run-1/blobs/routing/t-1"
    assert (ref.num_bytes, ref.sha256) == (7, hashlib.sha256(CONTENT).digest())
    assert blob_problem(ref, prefix=PREFIX) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"uri": "s3://bucket/weights/run-2/blobs/x"}, "is not a plain name under"),
        ({"uri": PREFIX}, "is not a plain name under"),
        ({"uri": f"{PREFIX}../../run-2/x"}, "is not a plain name under"),
        ({"uri": f"{PREFIX}a//b"}, "is not a plain name under"),
        ({"uri": f"{PREFIX}.hidden"}, "is not a plain name under"),
        ({"uri": f"{PREFIX}a?b"}, "is not a plain name under"),
        ({"uri": PREFIX + "x" * 1024}, "at most 1024"),
        ({"sha256": b"short"}, "BlobRef.sha256 has 5 bytes, which must be 32"),
        ({"num_bytes": 0}, "BlobRef.num_bytes is 0, at least 1"),
        ({"media_type": "image"}, "BlobRef.media_type is 'image', which must match"),
        ({"media_type": "a/" + "b" * 127}, "at most 128"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, object], complaint: str) -> None:
    ref = good()
    for name, value in fields.items():
        setattr(ref, name, value)
    assert complaint in (blob_problem(ref, prefix=PREFIX) or "")


def test_a_bad_reference_is_not_made() -> None:
    with pytest.raises(ValueError, match="is not a plain name under"):
        blob_ref(CONTENT, name="../x", prefix=PREFIX, media_type="image/png")

"""Recorded experts: read as their reference says, and anything else named."""

import re

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.blobs import blob_ref, expert_blobs
from astraflow.trajectories import BadTrajectory
from astraflow_trainer.batches.routing import RouterShape, delete_routing, recorded_routing
from astraflow_weights.errors import StoreRefused
from support.stepped_store import MemoryStore

ROUTED = np.array([[[0, 3], [1, 2]], [[2, 1], [3, 0]], [[1, 0], [0, 2]]], dtype=np.uint16)
MEDIA = "application/x-astraflow-expert-routing; layers=2; k=2; dtype={}"


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_experts_are_read_as_their_media_type_says(dtype: str) -> None:
    content = ROUTED.astype(f"<{np.dtype(dtype).str[1:]}").tobytes()
    ref = blob_ref(content, name="t", prefix="file:///s/run/blobs/", media_type=MEDIA.format(dtype))
    found = recorded_routing(ref, name="t", num_tokens=3, read={ref.uri: content}.__getitem__)
    assert found.dtype == np.uint16
    assert np.array_equal(found, ROUTED)
    RouterShape(num_layers=2, num_experts=4, experts_per_token=2).require("t", found)
    RouterShape().require("t", None)  # a dense model, and nothing recorded


def _gone(uri: str) -> bytes:
    raise LookupError(f"{uri}: no such object")


CONTENT = ROUTED.astype(np.uint8).tobytes()
WRONG = {
    "media": (MEDIA.format("int32"), CONTENT, "dtype=int32' of its expert routing; give"),
    "short": (
        MEDIA.format("uint16"),
        CONTENT,
        "has 12 bytes, 3 tokens × 2 layers × 2 experts of uint16 are 24",
    ),
    "empty": (
        MEDIA.format("uint8").replace("layers=2", "layers=0"),
        CONTENT,
        "0 layers × 2 experts of uint8 are 0",
    ),
    "other": (MEDIA.format("uint8"), CONTENT[::-1], "holds other bytes than were pushed"),
    "gone": (MEDIA.format("uint8"), None, "is gone: file:///s/run/blobs/t: no such object"),
}


@pytest.mark.parametrize(("media", "held", "words"), WRONG.values(), ids=WRONG)
def test_what_is_not_what_it_says_is_named(media: str, held: bytes | None, words: str) -> None:
    ref = blob_ref(CONTENT, name="t", prefix="file:///s/run/blobs/", media_type=media)
    read = _gone if held is None else {ref.uri: held}.__getitem__
    with pytest.raises(BadTrajectory, match=re.escape(words)) as error:
        recorded_routing(ref, name="t", num_tokens=3, read=read)
    assert error.value.slug == "bad_blob"


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0, 0, 0), "has 2 layers and 2 experts a token, the model 0 and 0"),
        ((3, 4, 2), "the model 3 and 2"),
        ((2, 4, 8), "the model 2 and 8"),
        ((2, 3, 2), "names expert 3 of 3"),
    ],
)
def test_what_these_routers_cannot_replay_is_named(shape: tuple[int, int, int], words: str) -> None:
    layers, experts, each = shape
    routers = RouterShape(num_layers=layers, num_experts=experts, experts_per_token=each)
    with pytest.raises(BadTrajectory, match=words):
        routers.require("t", ROUTED)


def test_one_expert_twice_is_named() -> None:
    twice = ROUTED.copy()
    twice[2, 1] = 2
    with pytest.raises(BadTrajectory, match="sends a token to one expert twice"):
        RouterShape(num_layers=2, num_experts=4, experts_per_token=2).require("t", twice)


def test_what_no_batch_can_refer_to_is_deleted() -> None:
    store = MemoryStore()
    names = [expert_blobs("solver", version=version) for version in (0, 3, 4, 11)]
    others = [expert_blobs("solver-2", version=0), "media/"]
    for name in (*names, *others):
        store.put_if_absent(f"run/blobs/{name}digest", b"x")
    delete_routing(store, run_id="run", policy_id="solver", before=4)
    assert set(store.objects) == {f"run/blobs/{name}digest" for name in (*names[2:], *others)}
    delete_routing(store, run_id="run", policy_id="solver", before=-2)
    assert len(store.objects) == 4


def test_a_store_that_does_not_let_go_of_them_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.put_if_absent(f"run/blobs/{expert_blobs('solver', version=0)}digest", b"x")

    def refuse(_key: str) -> None:
        raise StoreRefused("not allowed to delete")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(store, "delete", refuse)
        delete_routing(store, run_id="run", policy_id="solver", before=4)
    assert [(entry["event"], entry["message"]) for entry in logs] == [
        ("routing.not_deleted", "not allowed to delete")
    ]
    delete_routing(store, run_id="run", policy_id="solver", before=4)
    assert store.objects == {}

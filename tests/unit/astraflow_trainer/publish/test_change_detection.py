"""Changes found by torch operations: the same as by comparing on the host, and the same bytes in the store."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow_trainer.model.model import PolicyModel, local_part
from astraflow_trainer.publish.change_detection import DetectedChanges, Where, changed
from astraflow_trainer.publish.published import WeightCopies
from astraflow_weights.codec import delta, peers
from astraflow_weights.codec.shards import FoundChanges, KnownChanges, Shard, ShardedModel
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS, TensorSpec
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.delta import scan
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store.file import FileStore
from support.tiny_training import MakePolicy


def publisher(folder: Path) -> ShardPublisher:
    """Into a store of its own; two of them write the same log."""
    writer = VersionWriter.open(FileStore(folder), run_id="r", policy_id="p", epoch=1, nonce=bytes(16))
    return ShardPublisher(writer, uploads=writer.uploads, peers=peers.OnePeer(), base=None)


def parts(folder: Path) -> set[str]:
    """Names of all parts in a store, which are digests of their bytes."""
    return {path.name for path in folder.rglob("*.afwd")}


def nudge(policy: PolicyModel, *, share: float, seed: int) -> None:
    """Move a share of all weights to a neighbouring bf16 value, and some far."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            local = local_part(parameter)
            chosen = torch.rand(local.shape, generator=generator) < share
            far = torch.rand(local.shape, generator=generator) < 0.1
            moved = torch.where(far, -2.5 * local, local * (1 + 2**-7))
            local.copy_(torch.where(chosen, moved, local).to(torch.bfloat16))


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(
        st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.booleans()),
        min_size=4,
        max_size=40,
    )
)
def test_changes_are_those_the_host_finds_for_every_bit_pattern(bits: list[tuple[int, int, bool]]) -> None:
    whole = len(bits) // 4 * 4
    old = np.array([first for first, _, _ in bits[:whole]], np.uint16)
    new = np.array([first if same else second for first, second, same in bits[:whole]], np.uint16)
    positions, steps = changed(torch.from_numpy(new.view(np.int16)), torch.from_numpy(old.view(np.int16)))
    assert (positions.dtype, steps.dtype) == (torch.int32, torch.int16)
    expected_positions, expected_steps = scan(old, new)
    assert np.array_equal(positions.numpy().view(np.uint32), expected_positions)
    assert np.array_equal(steps.numpy().view(np.uint16), expected_steps)


@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_detected_changes_publish_what_copies_do(
    policy: PolicyModel, tmp_path: Path, snapshot: Where
) -> None:
    """Through a step that changes nothing, and one that changes most."""
    detected, copies = DetectedChanges(policy, snapshot=snapshot), WeightCopies(policy)
    versions = [publisher(tmp_path / name) for name in ("copied", "detected")]
    known: list[bool] = []
    for step, share in enumerate((0.0, 0.01, 0.0, 0.2, 0.9, 0.02)):
        nudge(policy, share=share, seed=step)
        for source, log in zip((copies, detected), versions, strict=True):
            taken = source.take()
            shards = taken.open()
            known.append(shards.changes is not None)
            taken.published(log.publish(shards, step=step).model_root)
    # Copies know no changes; neither does the first version, nor that in which most changed.
    assert known[::2] == [False] * 6
    assert known[1::2] == [False, True, True, True, False, True]
    assert parts(tmp_path / "copied") == parts(tmp_path / "detected")
    assert len(parts(tmp_path / "copied")) >= 6


def test_changes_over_another_version_are_found_anew(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy, versions = make_policy(), publisher(tmp_path)
    source = DetectedChanges(policy)
    first = source.take()
    first.published(versions.publish(first.open(), step=0).model_root)
    nudge(policy, share=0.1, seed=1)
    # Somebody published other bytes in between: what changed since step 0 is not what the next delta needs.
    other = WeightCopies(make_policy(seed=9)).take()
    versions.publish(other.open(), step=1)
    second = source.take()
    model = second.open()
    assert model.changes is not None
    committed = versions.publish(model, step=2)
    expected = WeightCopies(policy).take().open()
    for name, shard in model.shards.items():
        assert np.array_equal(shard.elements, expected.shards[name].elements), name
    assert committed.num_changed > 0.5 * committed.num_elements


def test_taking_again_allocates_nothing_of_the_size_of_the_model(policy: PolicyModel) -> None:
    source = DetectedChanges(policy)
    source.take().open()
    addresses = set()
    for seed in range(3):
        nudge(policy, share=0.02, seed=seed)
        taken = source.take()
        addresses.add(taken.open().shards["model.norm.weight"].elements.ctypes.data)
        taken.published(b"root")
    assert len(addresses) == 1


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("start", [0, 5, MAX_TILE_ELEMENTS - 2])
def test_known_changes_give_equal_tiles(start: int, context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets end at lines of the grid; words begin before a shard that begins inside one."""
    generator = np.random.default_rng(start)
    count = 2 * MAX_TILE_ELEMENTS + 7
    before = (generator.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    after = before.copy()
    moved = generator.choice(count, count // 50, replace=False)
    after[moved] += generator.integers(1, 4, len(moved)).astype(np.uint16)
    after[-1] += 1
    spec = TensorSpec(name="w", dtype="bfloat16", shape=(start + count,))
    pad = start % 4
    lines = range(-(-(start + 1) // MAX_TILE_ELEMENTS) * MAX_TILE_ELEMENTS, start + count, MAX_TILE_ELEMENTS)
    bounds = [start - pad, *lines]
    found = []
    for low, high in zip(bounds, [*bounds[1:], start + count], strict=True):
        first = max(low - start, 0)
        positions, steps = scan(before[first : high - start], after[first : high - start])
        shift = np.uint32(first - (low - start))
        found.append(FoundChanges(start=low - start, positions=positions + shift, steps=steps))
    base = ShardedModel(specs=(spec,), shards={"w": Shard(start=start, elements=before)})
    target = ShardedModel(specs=(spec,), shards={"w": Shard(start=start, elements=after)})
    knowing = replace(target, changes=KnownChanges(base_root=b"", found={"w": found}))
    expected = list(delta.encode_delta_tiles(base, target, context=context))
    # What is known is not looked for again.
    monkeypatch.setattr(tile_delta, "scan", None)
    assert list(delta.encode_delta_tiles(base, knowing, context=context)) == expected

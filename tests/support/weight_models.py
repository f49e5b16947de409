"""Small models for tests of the weight path, and stores that misbehave on request.

Models mix bfloat16 bit patterns, float32 and uint8, scalars and tensors without elements; every draw comes
from the seed that the test gives.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from astraflow_weights.codec.delta import apply_delta
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.shards import Shard, ShardedModel
from astraflow_weights.codec.tensors import Array, flat_unsigned, specs_of
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.errors import ObjectNotFound, Unavailable
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.manifest import PartRef

RUN, POLICY = "run-1", "solver"
KEYS = PolicyKeys(RUN, POLICY)
Models = list[dict[str, Array]]
# Bit patterns that break careless arithmetic: zeros of both signs, denormals, infinities, quiet and
# signalling NaNs with payloads, the ends of the range.
AWKWARD_BF16 = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80],
    dtype=np.uint16,
)


def make_model(seed: int = 0, *, rows: int = 24) -> dict[str, Array]:
    """About 3,000 elements of every kind the format carries."""
    draw = np.random.default_rng(seed)
    return {
        "model.embed.weight": gaussian_bf16(draw, (rows, 64)),
        "model.layer.weight": gaussian_bf16(draw, (rows, 37)),
        "model.awkward": AWKWARD_BF16.copy(),
        "model.scale": np.array(draw.standard_normal(), dtype=np.float32),
        "model.norm": draw.standard_normal(rows).astype(np.float32),
        "model.codes": draw.integers(0, 256, (rows, 3), dtype=np.uint8),
        "model.empty": np.zeros((0, 5), dtype=np.uint16),
    }


def gaussian_bf16(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Bit patterns of bfloat16 numbers around zero, as weights are."""
    values = (draw.standard_normal(shape) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def trained(model: Mapping[str, Array], seed: int, *, density: float = 0.02) -> dict[str, Array]:
    """The model after a step: a share of the elements moved by one or a few units in the last place."""
    draw = np.random.default_rng(seed)
    after = copied(model)
    for array in after.values():
        if array.dtype == np.uint16 and array.size:
            flat = array.reshape(-1)
            chosen = np.flatnonzero(draw.random(flat.size) < density)
            flat[chosen] += draw.choice(np.array([1, 0xFFFF, 2], dtype=np.uint16), len(chosen))
    return after


def adamw_like(count: int) -> list[dict[str, Array]]:
    """Masters in float32 that move by about the learning rate in each step, the direction changing slowly."""
    draw = np.random.default_rng(5)
    weights = (draw.standard_normal(200_000) * 0.02).astype(np.float32)
    momentum = draw.standard_normal(weights.size)
    models = []
    for _ in range(count):
        models.append({"w": ((weights.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)})
        momentum = 0.9 * momentum + np.sqrt(1 - 0.9**2) * draw.standard_normal(weights.size)
        weights = (weights - 1e-6 * momentum).astype(np.float32)
    return models


def codecs_of(store: ObjectStore, parts: Sequence[PartRef]) -> set[TileCodec]:
    """Encodings of the tiles in which something changed."""
    return {codec for ref in parts for codec in open_part(store.get(ref.key)).codecs}


def split_model(model: Mapping[str, Array], size: int) -> list[ShardedModel]:
    """The model in shards of about equal rows, as FSDP cuts it; a tensor with fewer rows is held by the first
    ones.
    """
    specs = specs_of(model)
    found: list[dict[str, Shard]] = [{} for _ in range(size)]
    for spec in specs:
        flat = flat_unsigned(model[spec.name])
        rows = spec.shape[0] if spec.shape else 1
        row = len(flat) // rows if rows else 0
        step = -(-rows // size)
        for index in range(size):
            start, stop = (min(rows, step * place) * row for place in (index, index + 1))
            if start < stop or (index == 0 and not len(flat)):
                found[index][spec.name] = Shard(start=start, elements=flat[start:stop].copy())
    return [ShardedModel(specs=specs, shards=shards) for shards in found]


def copied(model: Mapping[str, Array]) -> dict[str, Array]:
    """The same bits in other memory."""
    return {name: array.copy() for name, array in model.items()}


def applied(base: Mapping[str, Array], parts: Sequence[bytes]) -> dict[str, Array]:
    """What a delta makes of a copy of its base. Raises as `apply_delta` does."""
    model = copied(base)
    apply_delta(model, parts)
    return model


def same_model(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    """Whether both hold the same bits under the same names."""
    return left.keys() == right.keys() and all(same_array(left[name], right[name]) for name in left)


def same_array(left: Array, right: Array) -> bool:
    """Equality of dtype, shape and bits; NaNs equal themselves."""
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


class FaultyStore(FileStore):
    """A file store whose next answers can be lost: `lose_after` and `lose_before` count PUTs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lose_after = 0
        self.lose_before = 0
        self.before_put: Callable[[str, bytes], None] = lambda key, data: None
        """Called with each object to be created; what it raises is the answer."""
        self.gets: list[str] = []

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Create, but raise Unavailable before or after doing so while a counter says so."""
        self.before_put(key, data)
        if self.lose_before:
            self.lose_before -= 1
            lost(key)
        result = super().put_if_absent(key, data)
        if self.lose_after:
            self.lose_after -= 1
            lost(key)
        return result

    def get(self, key: str) -> bytes:
        """The content; the key is noted."""
        self.gets.append(key)
        return super().get(key)


def lost(key: str, *_: object) -> NoReturn:
    """A request for the object has no answer."""
    raise Unavailable(f"the request for {key} timed out")


def overwrite(store: ObjectStore, key: str, data: bytes) -> None:
    """Replace an object that exists, as only a fault or an attacker would. Raises ObjectNotFound."""
    if not any(info.key == key for info in store.list(key)):
        raise ObjectNotFound(key)
    store.put(key, data)


def flip(store: ObjectStore, key: str) -> None:
    """Flip a bit in the middle of an object."""
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    overwrite(store, key, bytes(data))

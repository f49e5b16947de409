"""An order, carried out as SGLang would have it done, leaves the model as a whole load would; or it says why not."""

import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from astraflow_raas.engine.changed_elements import ChangedOrders, WholeLoad
from astraflow_weights.codec.tensors import Array, flat_unsigned, specs_of
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.checkpoint import create_weights_file, map_weights

HIDDEN, HEADS, VOCAB = 6, 4, 10
Weights = Iterable[tuple[str, torch.Tensor]]


class Served(nn.Module):
    """Keeps what a checkpoint splits in one matrix, one of them transposed, as engines do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(VOCAB + 2, HIDDEN, dtype=dtype), requires_grad=False)
        self.qkv = nn.Parameter(torch.zeros(3 * HEADS, HIDDEN, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(HIDDEN, HEADS, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:VOCAB] = tensor
            elif name in "qkv":
                self.qkv.data.narrow(0, "qkv".index(name) * HEADS, HEADS).copy_(tensor)
            elif name == "down":
                # This rank's half of the columns.
                self.down.data.t().copy_(tensor.narrow(1, HEADS, HEADS).t())
            elif name == "norm":
                self.norm.data.copy_(tensor)


class Packed(Served):
    """Rearranges a matrix after it was loaded, as kernels ask for."""

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.norm.data.copy_(self.norm.data.flip(0).clone()) if self.norm.data.any() else None


class Copying(Served):
    """Copies before it copies."""

    def load_weights(self, weights: Weights) -> None:
        super().load_weights((name, tensor * 1) for name, tensor in weights)


class Derived(Served):
    def post_load_weights(self) -> None:
        """Whoever has this computes weights from others."""


def checkpoint(seed: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, HIDDEN), "down": (HIDDEN, 2 * HEADS), "norm": (HIDDEN,), "other": (3,)}
    shapes |= dict.fromkeys("qkv", (HEADS, HIDDEN))
    values = {name: torch.from_numpy(draw.normal(size=shape)).bfloat16() for name, shape in shapes.items()}
    return {name: value.view(torch.uint16).numpy() for name, value in values.items()}


def trained(model: dict[str, Array], seed: int) -> dict[str, Array]:
    draw, changed = np.random.default_rng(seed), {name: bits.copy() for name, bits in model.items()}
    for bits in changed.values():
        flat_unsigned(bits)[draw.random(bits.size) < 0.3] ^= 5
    return changed


class Engine:
    """A model, the loader as SGLang imports it, and the mirror's folder."""

    def __init__(self, folder: Path, model: Served) -> None:
        self.model, self.mirror = model, folder / "mirror"
        self.mirror.mkdir()
        self.bits = checkpoint(0)
        self.orders = ChangedOrders(folder / "orders")
        self.loader = imported(folder / "orders" / "astraflow_changed_loader.py")
        self.keep()
        self.model.load_weights(self.tensors())

    def keep(self) -> None:
        """Put the bits into the mirror."""
        path = self.mirror / "model.safetensors"
        path.unlink(missing_ok=True)
        create_weights_file(path, specs_of(self.bits))
        for name, into in map_weights(path, "r+").items():
            into[...] = self.bits[name]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.from_numpy(bits).view(torch.bfloat16)) for name, bits in self.bits.items()]

    def update(self, version: int) -> dict[str, object]:
        """Train, order, and have the order carried out; what came of it."""
        before, self.bits = self.bits, trained(self.bits, version)
        self.keep()
        positions = {
            name: np.flatnonzero(flat_unsigned(before[name]) != flat_unsigned(bits)).astype(np.uint32)
            for name, bits in self.bits.items()
        }
        changes = ChangedElements(base_version=version - 1, version=version, positions=positions)
        self.orders.write(changes, model_dir=self.mirror)
        self.loader.apply(self.model, [])
        return self.orders.require_done(num_ranks=1)

    def expected(self) -> Served:
        whole = Served(self.model.norm.dtype)
        whole.load_weights(self.tensors())
        return whole


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_model_is_what_a_whole_load_makes_of_it(tmp_path: Path, dtype: torch.dtype) -> None:
    engine = Engine(tmp_path, Served(dtype))
    for version in (1, 2, 3):
        done = engine.update(version)
        assert (done["traced"], done["whole"]) == (version == 1, 1)
        assert 0 < int(str(done["written"])) < 100
        for (name, found), wanted in zip(
            engine.model.named_parameters(), engine.expected().parameters(), strict=True
        ):
            assert torch.equal(found, wanted), f"{name} at version {version}"


@pytest.mark.parametrize(
    ("model", "why"),
    [(Packed, "no plain copy"), (Copying, "no plain copy"), (Derived, "derives weights")],
)
def test_a_model_that_keeps_weights_otherwise_is_loaded_whole(
    tmp_path: Path, model: Callable[[torch.dtype], Served], why: str
) -> None:
    engine = Engine(tmp_path, model(torch.bfloat16))
    with pytest.raises(WholeLoad, match=why):
        engine.update(1)


def test_other_weights_than_the_order_begins_with_are_noticed_at_the_first_one(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Served(torch.bfloat16))
    engine.model.norm.data[0] += 3
    engine.bits["norm"][0] ^= 0
    with pytest.raises(WholeLoad, match="norm is kept in another form"):
        engine.update(7)


def test_an_order_that_nobody_carried_out_is_noticed(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Served(torch.bfloat16))
    engine.update(1)
    changes = ChangedElements(base_version=1, version=2, positions={})
    engine.orders.write(changes, model_dir=engine.mirror)
    with pytest.raises(WholeLoad, match="rank 0 did not carry out"):
        engine.orders.require_done(num_ranks=1)
    engine.loader.apply(engine.model, [])
    engine.orders.require_done(num_ranks=1)
    with pytest.raises(WholeLoad, match="rank 1 says nothing"):
        engine.orders.require_done(num_ranks=2)


def test_a_full_disk_and_a_damaged_mirror_are_reasons_to_load_whole(tmp_path: Path) -> None:
    orders = ChangedOrders(tmp_path / "orders")
    changes = ChangedElements(base_version=0, version=1, positions={})
    with pytest.raises(WholeLoad, match="cannot be written"):
        orders.write(changes, model_dir=tmp_path)


def test_the_loader_needs_nothing_of_this_project(tmp_path: Path) -> None:
    orders = ChangedOrders(tmp_path)
    assert "import astraflow" not in (tmp_path / "astraflow_changed_loader.py").read_text()
    assert orders.environment({"PYTHONPATH": "/else"}) == {"PYTHONPATH": f"{tmp_path}:/else"}
    request = orders.request(version=3, num_ranks=2)
    assert json.dumps(request["load_format"]) == '"astraflow_changed_loader.apply"'
    assert len(request["serialized_named_tensors"]) == 2  # type: ignore[arg-type]

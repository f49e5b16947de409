"""Runs inside SGLang as its `--custom-weight-loader`: writes the changed elements of an order into the model's weights.

Invariant: it never raises, for that would end SGLang, and says beside the order what became of it; after an error the
weights are unknown until somebody loads them whole. It needs torch and numpy only and imports nothing of this project:
`changed_elements` copies it into the folder where the orders are, in SGLang's environment.

An element's place is found once: the model's own `load_weights` runs on tensors without memory, and whatever it copies
names a view of such a tensor and one of a parameter. The first order ends with all such views compared with the mirror,
bit for bit; a model that cuts, packs or derives its weights otherwise is refused.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HERE = Path(__file__).parent
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_loaders: dict[int, "_Loader"] = {}


def apply(model: Any, _named_tensors: object) -> None:  # noqa: ANN401 - SGLang's model
    """Carry out the order in this folder; SGLang calls it between two decode steps, in every tensor-parallel rank."""
    began_s = time.perf_counter()
    order = json.loads((_HERE / "order.json").read_text())
    outcome: dict[str, object] = {"nonce": order["nonce"]}
    try:
        loader = _loaders.setdefault(id(model), _Loader(model))
        outcome |= loader.carry_out(order)
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang would end of it
        outcome["error"] = f"{type(error).__name__}: {error}"[:500]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    outcome["seconds"] = round(time.perf_counter() - began_s, 6)
    written = _HERE / f"outcome-{rank}.new"
    written.write_text(json.dumps(outcome))
    written.replace(_HERE / f"outcome-{rank}.json")


@dataclass(frozen=True)
class _Place:
    """A view of a checkpoint's tensor that is copied to a view of a parameter, both given by shape and strides."""

    flat: torch.Tensor
    """All elements of the parameter's memory."""
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    from_start: int
    from_strides: tuple[int, ...]

    def write(self, positions: torch.Tensor, values: torch.Tensor) -> int:
        """The elements at these positions of the tensor, as far as they lie in this view."""
        positions, values = positions.to(self.flat.device), values.to(self.flat.device, self.flat.dtype)
        left = positions - self.from_start
        inside, into = left >= 0, torch.full_like(left, self.start)
        # From the widest stride to the narrowest, the quotient is the coordinate.
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.from_strides[axis]):
            at = left // self.from_strides[axis]
            left = left - at * self.from_strides[axis]
            into = into + at * self.strides[axis]
            inside &= at < self.shape[axis]
        inside &= left == 0
        self.flat.index_copy_(0, into[inside], values[inside])
        return int(inside.sum())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the parameter has the tensor's bits here."""
        wanted = tensor.as_strided(self.shape, self.from_strides, self.from_start).to(self.flat.dtype)
        found = self.flat.as_strided(self.shape, self.strides, self.start).cpu()
        words = _WORDS[wanted.element_size()]
        return torch.equal(found.contiguous().view(words), wanted.contiguous().view(words))


class _Trace(TorchDispatchMode):
    """What is copied out of tensors without memory, and where to; nothing is."""

    def __init__(self, sources: dict[str, torch.Tensor], owned: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {source.untyped_storage()._cdata: name for name, source in sources.items()}
        self._owned = owned
        self.places: dict[str, list[_Place]] = {name: [] for name in sources}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[torch.Tensor] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is not torch.ops.aten.copy_.default or _memory(args[0]) not in self._owned:
            return func(*args, **(kwargs or {}))
        into, source = args[:2]
        name = self._names.get(source.untyped_storage()._cdata)
        if name is None or source.shape != into.shape or 0 in source.stride():
            raise NotImplementedError(f"a parameter of shape {tuple(into.shape)} is no plain copy")
        place = _Place(
            flat=torch.empty(0, dtype=into.dtype, device=into.device).set_(into.untyped_storage()),
            shape=tuple(into.shape),
            start=int(into.storage_offset()),
            strides=into.stride(),
            from_start=int(source.storage_offset()),
            from_strides=source.stride(),
        )
        self.places[name].append(place)
        return into


class _Loader:
    """Of one model."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - SGLang's model
        if hasattr(model, "post_load_weights"):
            raise NotImplementedError(f"{type(model).__name__} derives weights from those that it loads")
        self._model = model
        self._places: dict[str, list[_Place]] | None = None

    @torch.no_grad()
    def carry_out(self, order: dict[str, Any]) -> dict[str, object]:
        """Apply the changes of one order; what was done."""
        mirror = _Mirror(Path(order["mirror"]))
        places = self._places or self._trace(mirror)
        # Those without a place are not this rank's, are tied to others, or the model looks at their values.
        whole = [name for name in order["tensors"] if not places[name]]
        num_written = sum(
            place.write(*_changes(mirror.dtype(name), start, count))
            for name, (start, count) in order["tensors"].items()
            for place in places[name]
        )
        if whole:
            self._model.load_weights([(name, mirror.tensor(name)) for name in whole])
        if self._places is None:
            self._compare(places, mirror)
        was_traced, self._places = self._places is None, places
        return {"written": num_written, "whole": len(whole), "traced": was_traced}

    def _trace(self, mirror: "_Mirror") -> dict[str, list[_Place]]:
        """Where the elements of each tensor go. Raises NotImplementedError when that cannot be said."""
        sources = {
            name: torch.empty(tensor["shape"], dtype=mirror.dtype(name), device="meta")
            for name, tensor in mirror.header.items()
        }
        kept = [*self._model.parameters(), *self._model.buffers()]
        owned = [_memory(tensor) for tensor in kept]
        with _Trace(sources, set(owned)) as trace:
            self._model.load_weights(list(sources.items()))
        if [_memory(tensor) for tensor in kept] != owned:
            raise NotImplementedError("the model replaces its parameters when it loads")
        places: dict[str, list[_Place]] = trace.places
        return places

    def _compare(self, places: dict[str, list[_Place]], mirror: "_Mirror") -> None:
        for name, own in places.items():
            if own and not all(place.holds(mirror.tensor(name)) for place in own):
                raise NotImplementedError(f"{name} is kept in another form than in the checkpoint")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _changes(dtype: torch.dtype, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int64[count] in the flat tensor, and the values there, of one tensor of the order."""
    content = np.memmap(
        _HERE / "changes.bin", np.uint8, "r", offset=start, shape=(count * (4 + dtype.itemsize),)
    )
    positions = torch.from_numpy(content[: 4 * count].view(np.uint32).astype(np.int64))
    return positions, _tensor(content[4 * count :], dtype)


def _tensor(content: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """A copy of these bytes."""
    return torch.from_numpy(np.array(content).view(f"u{dtype.itemsize}")).view(dtype)


class _Mirror:
    """The weights file of the version, mapped."""

    def __init__(self, path: Path) -> None:
        self._content = np.memmap(path, np.uint8, "r")
        self._data = 8 + int(self._content[:8].view(np.uint64)[0])
        self.header: dict[str, Any] = json.loads(bytes(self._content[8 : self._data]))
        self.header.pop("__metadata__", None)

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.header[name]["dtype"]]

    def tensor(self, name: str) -> torch.Tensor:
        """A copy: what is mapped here may not be written to."""
        start, end = (self._data + at for at in self.header[name]["data_offsets"])
        return _tensor(self._content[start:end], self.dtype(name)).reshape(self.header[name]["shape"])

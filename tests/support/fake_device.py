"""A device that this machine does not have, with real numbers: what is made elsewhere cannot be mixed with what is
there.

Tensors on it say that their device is `DEVICE` (torch's meta device, which needs no driver) and keep their values in an
ordinary tensor inside. Within `FakeDevice()` every operation is done on these; as on a GPU, one that is given tensors
of both places raises, but for CPU numbers without dimensions, and only `.to`, `.cpu`, `copy_` and reading a number
cross over.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_CROSSING = ("aten._to_copy.", "aten.copy_.", "aten._local_scalar_dense.", "aten.is_pinned.")


class Elsewhere(torch.Tensor):
    """A tensor on the device; `numbers` is where they are."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls: "type[Elsewhere]", values: torch.Tensor) -> "Elsewhere":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=values.requires_grad,
        )
        made.numbers = values.detach()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...],
        kwargs: dict[Any, Any],
    ) -> Any:
        return _done(func, args, dict(kwargs or {}))


class FakeDevice(TorchDispatchMode):
    """Within it, tensors can also be made on the device; `operations` counts what was done there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        done = _done(func, args, dict(kwargs or {}))
        self.operations += any(isinstance(item, Elsewhere) for item in tree_flatten(done)[0])
        return done


def _done(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = str(func)
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    there = [item for item in tensors if isinstance(item, Elsewhere)]
    device, crossing = kwargs.get("device"), name.startswith(_CROSSING)
    if there and not crossing:
        here = [item for item in tensors if not isinstance(item, Elsewhere) and item.ndim]
        if here:
            raise RuntimeError(
                f"{name} is given tensors of two devices: of the model's {[tuple(item.shape) for item in there]}, of "
                f"the CPU's {[tuple(item.shape) for item in here]}"
            )
    if device is not None and torch.device(device) == DEVICE:
        kwargs["device"] = "cpu"
        lands = True
    else:
        lands = bool(there) and device is None and not name.startswith("aten.copy_.")
    inside = tree_map(lambda item: item.numbers if isinstance(item, Elsewhere) else item, (args, kwargs))
    result = func(*inside[0], **inside[1])
    if name.startswith("aten.copy_.") or _is_in_place(func, args):
        return args[0]
    return tree_map(
        lambda item: Elsewhere(item) if lands and isinstance(item, torch.Tensor) else item, result
    )


def _is_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    return (
        bool(args)
        and isinstance(args[0], Elsewhere)
        and func._schema.name.endswith("_")
        and not func._schema.name.endswith("__")
    )

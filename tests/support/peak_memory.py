"""The most memory that tensors take at once, counted as they come and go."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory(TorchDispatchMode):
    """Within it every tensor that is made is counted until nobody has it, or it is given no room any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages = WeakIdKeyDictionary()

    @property
    def now(self) -> int:
        """Bytes that are taken."""
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor):
                local = item._local_tensor if isinstance(item, DTensor) else item
                self._storages[local.untyped_storage()] = True
        self.peak = max(self.peak, self.now)
        return result

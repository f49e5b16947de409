"""Lets torchvision, which SGLang imports for models that see, be imported beside a torch without CUDA: its own library
does not load there, so the two operators that it describes further are declared here before it.

Run at the start of every interpreter of that environment, by a `.pth` file.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

_kept: list[object] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch  # here: most interpreters of that environment never need it

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())

"""Stands in for SGLang's CUDA kernels, of which there is no CPU build to install: one of them in torch, the others
raise when they are called. Memory is not pinned.

A module that is imported below this one holds such kernels too; `scalar_type` is missing, which SGLang can deal with.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

__version__ = "0.4.7"
__path__: list[str] = []


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: object,
) -> None:
    """Write each request's new cache locations, one after the other in `out_cache_loc`, into its row of the table."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=False
    ):
        locations = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = locations.to(req_to_token.dtype)
        taken += end - start


class _Missing:
    """A kernel, or anything else, that only the CUDA build has."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {self.__name__}")

    def __getattr__(self, name: str) -> "_Missing":
        return _Missing(f"{self.__name__}.{_public(name)}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        return _Missing(f"{self.__name__}.{_public(name)}")


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `sgl_kernel` but one."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or name == f"{__name__}.scalar_type":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def __getattr__(name: str) -> Any:
    return _Missing(_public(name))


def _public(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return make(*arguments, **settings)

    return made


def _pin_nothing() -> None:
    """SGLang's LoRA layers ask for pinned memory on any device; a torch without CUDA refuses it."""
    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


sys.meta_path.append(_Modules())
if not torch.cuda.is_available():
    _pin_nothing()

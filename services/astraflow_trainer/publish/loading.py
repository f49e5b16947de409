"""Reads a policy's first weights, each rank only what it holds: ranges of Hugging Face tensors, as they are published.

Invariant: no rank ever has the whole model. It is built without memory, sharded, given memory for the shards, and these
are read from slices of the safetensors files; values and buffers are those of `model.load_causal_lm`, to the bit. The
learner calls it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh

from astraflow.errors import InvalidArgumentError
from astraflow_kit.log import get_logger
from astraflow_trainer.model.model import (
    CriticModel,
    PackedModel,
    PolicyModel,
    empty_causal_lm,
    load_causal_lm,
    local_part,
)
from astraflow_trainer.model.sharding import Placement, shard
from astraflow_trainer.publish.published import HeldPart
from astraflow_weights.codec.tensors import TensorSpec

log = get_logger(__name__)

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_HEAD = "lm_head.weight"
"""A critic has one of its own."""


def load_policy(
    directory: Path, *, mesh: DeviceMesh, placement: Placement, frozen: bool = False
) -> PolicyModel:
    """The model of a Hugging Face directory, sharded over `mesh`; with `frozen` nothing of it is trained.

    A directory whose tensors have other names than the model's own is loaded whole by transformers, then sharded.
    Raises InvalidArgumentError where a tensor has another shape than the model's configuration says, and as
    transformers does.
    """
    dtype = torch.bfloat16 if frozen and placement.compute == "bf16" else torch.float32
    policy, files = PolicyModel(empty_causal_lm(directory, dtype=dtype)), _files(directory)
    missing = [spec.name for spec in HeldPart(policy).specs if spec.name not in files]
    if missing:
        log.info("model.loaded_whole", directory=str(directory), missing=missing[0])
        policy = PolicyModel(load_causal_lm(directory)).requires_grad_(requires_grad=not frozen)
        policy.to(torch.device(mesh.device_type))
        shard(policy, mesh=mesh, placement=placement)
        return policy
    shard(policy, mesh=mesh, placement=placement)
    _take_memory(policy, torch.device("cpu") if placement.offload else policy.device)
    _fill(HeldPart(policy), files)
    return policy.requires_grad_(requires_grad=not frozen)


def load_critic(directory: Path, *, mesh: DeviceMesh, placement: Placement) -> CriticModel:
    """A critic that begins as the model of a Hugging Face directory, its head as zeros, sharded over `mesh`.

    Raises as `load_policy` does.
    """
    critic, files = CriticModel(empty_causal_lm(directory)), dict(_files(directory))
    missing = [spec.name for spec in HeldPart(critic).specs if spec.name not in {*files, _HEAD}]
    if missing:
        log.info("model.loaded_whole", directory=str(directory), missing=missing[0])
        critic = CriticModel(load_causal_lm(directory)).to(torch.device(mesh.device_type))
        shard(critic, mesh=mesh, placement=placement)
        return critic
    shard(critic, mesh=mesh, placement=placement)
    _take_memory(critic, torch.device("cpu") if placement.offload else critic.device)
    held = HeldPart(critic)
    local_part(held.parameters[_HEAD].detach()).zero_()
    _fill(held, {name: path for name, path in files.items() if name != _HEAD})
    return critic


def _files(directory: Path) -> Mapping[str, Path]:
    """The file of each tensor; empty where the directory has no safetensors."""
    if (index := directory / _INDEX).is_file():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    if not (whole := directory / _WHOLE).is_file():
        return {}
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)


def _take_memory(policy: PackedModel, device: torch.device) -> None:
    """Parameters become memory that nothing is written to yet; buffers keep what they hold."""
    kept = [
        (module, name, buffer)
        for module in policy.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    policy.to_empty(device=device)
    for module, name, buffer in kept:
        module._buffers[name] = buffer.to(policy.device)


@torch.no_grad()
def _fill(held: HeldPart, files: Mapping[str, Path]) -> None:
    specs = {spec.name: spec for spec in held.specs}
    parts = {name: local_part(parameter).view(-1) for name, parameter in held.parameters.items()}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name, item in held.tensors.items():
                if files.get(name) != path:
                    continue
                values, at = _elements(file, specs[name], item.start, item.count, path=path), 0
                for parameter, start, count in item.sources:
                    parts[parameter][start : start + count].copy_(values[at : at + count])
                    at += count


def _elements(
    file: Any,  # noqa: ANN401 - safetensors has no public type
    spec: TensorSpec,
    start: int,
    count: int,
    *,
    path: Path,
) -> torch.Tensor:
    """Elements [start, start + count) of a flat tensor, of whose rows only those that hold them are read."""
    tensor = file.get_slice(spec.name)
    shape = tuple(tensor.get_shape())
    if shape != spec.shape:
        raise InvalidArgumentError(
            f"{path} has {spec.name} as {shape}, the model of its config.json as {spec.shape}; it is damaged, or of "
            "another model: get it again"
        )
    row = spec.num_elements // shape[0]
    first = start // row
    rows: torch.Tensor = tensor[first : -(-(start + count) // row)]
    return rows.reshape(-1)[start - first * row :][:count]

"""What finding and compacting changes costs where the weights live, beside reading both copies once.

Invariant: the figure is a ratio inside one process: the least time of several tries over the time that the same
device takes to read as many bytes, from its copies of the same weights. What is found is compared with what was
changed before it is reported. Weights lie side by side and are compared in groups, as a trainer does; as many as an
8B model has (Qwen3-8B) unless others are asked for. `astraflow bench detect` prints it; imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from astraflow_trainer.publish.change_detection import changed

__all__ = ["DEFAULT_ELEMENTS", "DetectionReport", "measure_detection"]

DEFAULT_ELEMENTS = {"cpu": 2**24, "cuda": 8_190_735_360}
_GROUP = 2**28
_ALIGNED = 16


@dataclass(frozen=True, kw_only=True)
class DetectionReport:
    """Everything measured; `astraflow bench detect --json` prints its fields."""

    device: str
    num_elements: int
    density: float
    """Changed share."""
    copy_bytes_per_s: float
    """Bytes read and written per second when the device copies the tensors."""
    read_both_s: float
    """Reading old and new once at that rate."""
    detect_s: float
    """Finding all changes and compacting them to positions and steps."""
    over_read: float
    """`detect_s` / `read_both_s`."""
    to_host_s: float
    """Copying positions and steps to the host."""
    bytes_to_host: int
    """Six per change."""


def measure_detection(
    *, num_elements: int, density: float, device: str, repeats: int, seed: int
) -> DetectionReport:
    """Measure on synthetic weights of which a share changes. Raises ValueError for a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use --device cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    old = [_weights(size, generator=generator) for size in _sizes(num_elements)]
    new = [_stepped(bits, density=density, generator=generator) for bits in old]
    num_changed = sum(int((after != before).sum()) for after, before in zip(new, old, strict=True))
    found = [changed(*pair) for pair in zip(new, old, strict=True)]
    _check(found, new=new, old=old, num_changed=num_changed)
    size_bytes = sum(bits.nbytes for bits in old)

    def detect() -> None:
        for pair in zip(new, old, strict=True):
            changed(*pair)

    copy_s = _least_s(_copier(old), repeats=repeats, device=device)
    detect_s = _least_s(detect, repeats=repeats, device=device)
    to_host_s = _least_s(_transfer(found), repeats=repeats, device=device)
    rate = 2 * size_bytes / copy_s
    return DetectionReport(
        device=torch.cuda.get_device_name()
        if device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        num_elements=size_bytes // 2,
        density=num_changed / (size_bytes // 2),
        copy_bytes_per_s=rate,
        read_both_s=2 * size_bytes / rate,
        detect_s=detect_s,
        over_read=detect_s * rate / (2 * size_bytes),
        to_host_s=to_host_s,
        bytes_to_host=sum(positions.nbytes + steps.nbytes for positions, steps in found),
    )


def _sizes(num_elements: int) -> Iterator[int]:
    """Elements of groups until there are as many as asked for, each aligned."""
    left = max(_ALIGNED, num_elements // _ALIGNED * _ALIGNED)
    while left:
        yield min(left, _GROUP)
        left -= min(left, _GROUP)


def _weights(size: int, *, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0.0, 0.02, generator=generator).view(torch.int16)


def _stepped(bits: torch.Tensor, *, density: float, generator: torch.Generator) -> torch.Tensor:
    """About `density` of the elements moved by one unit."""
    after = bits.clone()
    count = round(density * len(bits))
    if count:
        chosen = torch.randint(len(bits), (count,), generator=generator, device=bits.device)
        after[chosen] += 1
    return after


def _check(
    found: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    new: list[torch.Tensor],
    old: list[torch.Tensor],
    num_changed: int,
) -> None:
    """The changes lead from old to new, and there are no more of them."""
    for (positions, steps), after, before in zip(found, new, old, strict=True):
        rebuilt = before.clone()
        rebuilt[positions.long()] += steps
        if not torch.equal(rebuilt, after):
            raise AssertionError("the changes found do not lead from the old weights to the new")
    assert sum(len(positions) for positions, _ in found) == num_changed


def _copier(tensors: list[torch.Tensor]) -> Callable[[], None]:
    largest = torch.empty_like(max(tensors, key=len))

    def copy() -> None:
        for bits in tensors:
            largest[: len(bits)].copy_(bits)

    return copy


def _transfer(found: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Copy the changes to host memory, pinned where there is a device."""
    flat = [tensor for changes in found for tensor in changes]
    hosts = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for tensor in flat]

    def transfer() -> None:
        for host, tensor in zip(hosts, flat, strict=True):
            host.copy_(tensor, non_blocking=True)

    return transfer


def _least_s(work: Callable[[], None], *, repeats: int, device: str) -> float:
    """Least wall time of several tries, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - started)
    return max(min(taken[1:]), 1e-9)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

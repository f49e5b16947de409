"""A step on a GPU: tokens a second and share of the device's arithmetic at shapes of Qwen3, beside the plain loop and
TRL; what weights cost there that come as a delta, and changes that are looked for.

Invariant: by the clock, the device waited for, the least of several turns, every method alone on the device. Without a
GPU every figure says that it was not measured; `--toy` runs all of it on the CPU, on the small model of the other
sections, to show that it works. Called by `experiment`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from astraflow_bench.figures import Figure
from astraflow_bench.trainer.methods import COMPILED, METHODS, OURS, PLAIN, Step, Task, lacking, ours
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, model_shape, rows_of
from astraflow_bench.weights.detection import DEFAULT_ELEMENTS, measure_detection
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import ModelShape
from astraflow_trainer.ranks.device import CPU, training_device
from astraflow_trainer.ranks.group import join_rank_group
from astraflow_trainer.settings import RankSettings
from astraflow_weights.codec.delta import encode_delta
from astraflow_weights.codec.parts.reader import open_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tiles.delta import decode_tile
from astraflow_weights.codec.tiles.grid import PartKind

_NO_GPU = "no GPU"
_LEAST_MFU, _LEAST_OVER_PLAIN, _MOST_READS = 45.0, 1.3, 2.0
_TARGET = ("Qwen3-8B", 8192)
_ROWS, _MORE_ROWS, _MOST_ROWS, _ROWS_PER_MEDIAN = 24, 48, 96, 16
"""Geometric lengths with a sixteenth of the budget in the middle: 24 rows are two passes when packed. More rows up to
8,192 tokens a pass, most where there is a target: what a step costs once then counts as little as in real batches.
"""
_DENSITY = 0.01
_STATE_BYTES = 20
"""Of a parameter: master, moments and gradient in fp32, and a bf16 copy with room to spare."""
_PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 FLOP/s of dense products, as the maker of the device states them."""


def _qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        vocab_size=151_936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=inner, max_position_embeddings=40_960,
        rope_theta=1e6, tie_word_embeddings=tied,
    )  # fmt: skip


_SHAPES = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12_288, tied=False),
}


@dataclass(frozen=True, kw_only=True)
class _Device:
    """What is measured on, and how much of everything fits it."""

    device: torch.device
    shapes: Mapping[str, ModelShape]
    budgets: tuple[int, ...]
    num_elements: int
    """Weights that are looked through for changes."""
    turns: int

    @classmethod
    def of(cls, sizes: TrainerSizes) -> _Device:
        """The first GPU, or the CPU for a toy."""
        if sizes.toy:
            shapes, budgets = {"toy": model_shape(sizes)}, (16 * sizes.median,)
            return cls(device=CPU, shapes=shapes, budgets=budgets, num_elements=2**16, turns=sizes.turns)
        device = training_device("auto", local_rank=0)
        room = 0 if device == CPU else torch.cuda.get_device_properties(device).total_memory
        return cls(
            device=device,
            shapes={name: _fitting(shape, room=room // 2) for name, shape in _SHAPES.items()},
            budgets=(4096, 8192, 16_384),
            num_elements=min(DEFAULT_ELEMENTS["cuda"], room // 8),
            turns=sizes.turns,
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """Least time of a turn by the clock, after one that is not counted."""
        taken = []
        for _ in range(self.turns + 1):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - started)
        return min(taken[1:])

    def wait(self) -> None:
        """Until all that was begun is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure_gpu(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """Rate, MFU and memory of a step at each shape and length by each method; changes found and applied."""
    place = _Device.of(sizes)
    if place.device == CPU and not sizes.toy:
        return _unmeasured(place)
    if dist.is_initialized():
        # Other sections' group of one knows no GPU.
        dist.destroy_process_group()
    join_rank_group(RankSettings(), timeout_s=60.0, device=place.device)
    # One of every shape and length: beyond its limit torch would go on uncompiled.
    torch._dynamo.config.recompile_limit = 64
    peak = _peak(place)
    assert peak.value is not None
    figures = [peak]
    for name, shape in place.shapes.items():
        for budget in place.budgets:
            figures += _steps(place, name, shape, budget=budget, peak=peak.value)
    return [*figures, *_changes(place)]


def _unmeasured(place: _Device) -> list[Figure]:
    missing = partial(Figure, value=None, unit=_NO_GPU)
    whats = [
        *(f"{name}, {budget} tokens a pass: rate" for name in place.shapes for budget in place.budgets),
        "changes on the device",
        "a delta decoded and applied on the device",
    ]
    return [missing(what=what, subject="") for what in whats]


def _fitting(shape: ModelShape, *, room: int) -> ModelShape:
    """With as many layers as have their state in `room` bytes; at least one, at most its own."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    layers = (room // _STATE_BYTES - ends) // _layer_weights(shape)
    return replace(shape, num_hidden_layers=min(shape.num_hidden_layers, max(1, layers)))


def _layer_weights(shape: ModelShape) -> int:
    """Weights of a layer's matrices."""
    heads = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    return shape.hidden_size * (heads + 3 * shape.intermediate_size)


def model_flops(shape: ModelShape, rows: list[TrainingRow]) -> float:
    """What a step must compute, forward and backward, padding and recomputing left out: 6 a weight and token, the
    head's for trained tokens only, and causal attention, 6 · length² · width of the heads a layer (arXiv 2204.02311,
    appendix B, of which a causal mask leaves half).
    """
    tokens, trained = sum(row.num_tokens for row in rows), sum(row.num_trained_tokens for row in rows)
    squares = sum(row.num_tokens**2 for row in rows)
    width = shape.num_attention_heads * shape.head_dim
    layers = shape.num_hidden_layers * (_layer_weights(shape) * tokens + width * squares)
    return 6.0 * (layers + shape.vocab_size * shape.hidden_size * trained)


def _peak(place: _Device) -> Figure:
    """FLOP/s that a step is compared with: stated by the maker, else what a large product reaches here."""
    what, unit, name = "bf16 arithmetic of the device", "TFLOP/s", "CPU"
    if place.device.type == "cuda":
        name = torch.cuda.get_device_name()
        stated = next((peak for part, peak in _PEAKS.items() if part in name), None)
        if stated is not None:
            return Figure(what=what, subject=f"{name}, as stated", value=stated / 1e12, unit=unit)
    side = 8192 if place.device.type == "cuda" else 256
    factor = torch.randn(side, side, device=place.device, dtype=torch.bfloat16)
    rate = 2 * side**3 / place.seconds(lambda: factor @ factor)
    return Figure(what=what, subject=f"{name}, product of {side} × {side}", value=rate / 1e12, unit=unit)


def _steps(place: _Device, name: str, shape: ModelShape, *, budget: int, peak: float) -> Iterator[Figure]:
    whole = _SHAPES.get(name, shape).num_hidden_layers
    layers = "" if shape.num_hidden_layers == whole else f", {shape.num_hidden_layers} of {whole} layers"
    rows = rows_of(geometric_lengths(_num_rows(place, name, budget), median=budget // _ROWS_PER_MEDIAN))
    task = Task(shape=shape, rows=rows, budget=budget, device=place.device, compute="bf16")
    what, seconds = f"{name}{layers}, {budget} tokens a pass, {len(rows)} rows", {}
    aim = place.device.type == "cuda" and (name, budget) == _TARGET
    for method, made in _methods(place).items():
        row = partial(Figure, subject=method)
        try:
            reason = f"{lacking(method)} is not installed" if lacking(method) else ""
            seconds[method], memory = (0.0, 0) if reason else _timed(place, made, task)
        except torch.OutOfMemoryError:
            reason = "the device's memory is too small"
        if reason:
            yield row(what=f"{what}: rate", value=None, unit=reason)
            continue
        share = 100 * model_flops(shape, rows) / seconds[method] / (1e12 * peak)
        least = _LEAST_MFU if aim and method == COMPILED else None
        yield row(
            what=f"{what}: rate", value=sum(r.num_tokens for r in rows) / seconds[method], unit="tokens/s"
        )
        yield row(what=f"{what}: MFU", value=share, unit="%", least=least)
        if memory:
            yield row(what=f"{what}: peak memory", value=memory / 1e9, unit="GB")
    for method in (OURS, COMPILED):
        if PLAIN not in seconds or method not in seconds:
            continue
        least, over = _LEAST_OVER_PLAIN if aim else None, seconds[PLAIN] / seconds[method]
        yield Figure(
            what=f"{what}: rate over the plain loop", subject=method, value=over, unit="×", least=least
        )


def _methods(place: _Device) -> dict[str, Callable[[Task], Step]]:
    """Those of every device, and ours compiled on a GPU."""
    return {
        OURS: ours,
        **({COMPILED: partial(ours, compiled=True)} if place.device.type == "cuda" else {}),
        **METHODS,
    }


def _num_rows(place: _Device, name: str, budget: int) -> int:
    if place.device.type == "cpu" or budget > _TARGET[1]:
        return _ROWS
    return _MOST_ROWS if (name, budget) == _TARGET else _MORE_ROWS


def _timed(place: _Device, made: Callable[[Task], Step], task: Task) -> tuple[float, int]:
    """Seconds of a step, and bytes of the device at its peak; 0 on a CPU. Nothing of it stays."""
    on_gpu = place.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = place.seconds(made(task))
    return seconds, torch.cuda.max_memory_allocated() if on_gpu else 0


def _changes(place: _Device) -> list[Figure]:
    """What a trainer and a node with their weights on the device do for a version of which a hundredth changed."""
    on_gpu = place.device.type == "cuda"
    gc.collect()
    found = measure_detection(
        num_elements=place.num_elements,
        density=_DENSITY,
        device=place.device.type,
        repeats=place.turns,
        seed=0,
    )
    apply_s, decode_s, num_applied = _applied(place)
    subject, applied = (
        f"{100 * _DENSITY:g} % of {count / 1e6:,.3g} M" for count in (found.num_elements, num_applied)
    )
    delta = partial(Figure, subject=applied, unit="s")
    return [
        Figure(what="changes on the device", subject=subject, value=found.detect_s, unit="s"),
        Figure(what="changes on the device: over reading both copies", subject=subject, value=found.over_read,
               unit="×", most=_MOST_READS if on_gpu else None),
        delta(what="a delta decoded and applied on the device", value=decode_s + apply_s),
        delta(what="a delta decoded and applied on the device: copying and adding alone", value=apply_s),
    ]  # fmt: skip


def _applied(place: _Device) -> tuple[float, float, int]:
    """Seconds of copying decoded steps to the device and adding them, of decoding on one core; weights."""
    count = min(place.num_elements, 2**28)
    generator = np.random.default_rng(0)
    base = generator.integers(0x3C00, 0x3D00, count, dtype=np.uint16)
    target = base.copy()
    target[generator.choice(count, round(_DENSITY * count), replace=False, shuffle=False)] += 1
    parts, schema = encode_delta({"w": base}, {"w": target}), Schema.of_model({"w": base})
    # Added again and again, steps wrap around as they do for any base.
    bits = torch.from_numpy(base.view(np.int16)).to(place.device)

    def decoded() -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        found = []
        for tile in open_parts(parts, kind=PartKind.DELTA, schema=schema).tiles:
            steps = decode_tile(tile, base=None)
            assert steps.positions is not None
            found.append(
                (
                    tile.start,
                    torch.from_numpy(steps.positions.view(np.int32)),
                    torch.from_numpy(steps.values.view(np.int16)),
                )
            )
        return found

    def apply() -> None:
        for start, positions, steps in held:
            bits[start:].index_add_(0, positions.to(place.device), steps.to(place.device))

    held = decoded()
    apply()
    if not np.array_equal(bits.cpu().numpy().view(np.uint16), target):
        raise AssertionError("a delta applied on the device did not lead to its target bit by bit")
    return place.seconds(apply), place.seconds(decoded), count

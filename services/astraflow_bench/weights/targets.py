"""What the weight path must reach, each as a measured ratio beside its limit.

Invariant: every figure comes from the report; nothing is measured here. Bytes of the small trained model are
judged without framing, whose share only models of 100 M weights and more must keep small. `astraflow bench
weights` prints the list and fails when one is missed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from astraflow_bench.weights.benchmark import Figures, WeightsReport
from astraflow_weights.codec.kernel import Isa

# The learning rate whose density, 1 %, targets of CPU and of peers are about.
USUAL_LEARNING_RATE = 1e-6
_DENSITIES = 0.003, 0.07
_CONTEXT_DENSITY = 0.026
_LARGE_MODEL = 100_000_000


@dataclass(frozen=True)
class Target:
    """A bound that the benchmark holds itself to."""

    name: str
    measured: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the figure is within its bound."""
        return self.measured <= self.limit

    def as_json(self) -> Figures:
        """With the verdict."""
        return {"name": self.name, "measured": self.measured, "limit": self.limit, "met": self.met}


def targets(report: WeightsReport) -> list[Target]:
    """All that the report has figures for."""
    found = [target for figures in report.deltas for target in _of_delta(figures)]
    found += [
        Target("merged delta of 8 / sum of its members", report.merge["over_sum"], 0.55),
        Target("snapshot / safetensors", report.snapshot["over_safetensors"], 0.69),
    ]
    found += [target for figures in report.experts for target in _of_experts(figures)]
    return [*found, *_of_cpu(report)]


def _of_delta(figures: Figures) -> Iterator[Target]:
    density, trained = figures["density"], figures["source"] == "trained"
    at = f", {figures['source']}, {100 * density:.2f} %"
    share = figures["framing_share"]
    bodies = {codec: 1 - share[codec] if trained else 1.0 for codec in share}
    if _DENSITIES[0] <= density <= _DENSITIES[1]:
        yield Target("RICE / entropy bound" + at, figures["rice_over_bound"] * bodies["rice"], 1.02)
    if _DENSITIES[0] <= density <= _CONTEXT_DENSITY:
        over = figures["rice_ctx_over_bound"], figures["rice_ctx_over_context_bound"]
        yield Target("RICE_CTX / entropy bound" + at, over[0] * bodies["rice_ctx"], 0.75)
        yield Target("RICE_CTX / context bound" + at, over[1] * bodies["rice_ctx"], 1.06)
    if is_usual(figures["learning_rate"]):
        peers = figures["over_peer"]
        yield Target("RICE_CTX / dense XOR + zstd-1" + at, peers["dense XOR + zstd-1"]["rice_ctx"], 0.34)
        yield Target(
            "RICE_CTX / u16 gaps + XOR + zstd-1" + at, peers["u16 gaps + XOR + zstd-1"]["rice_ctx"], 0.51
        )
    if figures["num_elements"] >= _LARGE_MODEL:
        yield Target("framing and digests / RICE_CTX delta" + at, share["rice_ctx"], 0.01)


def _of_experts(figures: Figures) -> Iterator[Target]:
    """With everything that is stored we take less than the densest peer, at any density."""
    peer, at = "u16 gaps + XOR + zstd-1", f", experts, {figures['density']:g}"
    ours, theirs = figures["bytes_per_change"]["rice"], figures["bytes_per_change"][peer]
    yield Target(f"RICE / {peer}, both with framing" + at, ours / theirs, 1.0)


def is_usual(learning_rate: float) -> bool:
    """Whether this is the learning rate of the targets."""
    return abs(learning_rate / USUAL_LEARNING_RATE - 1) < 1e-6


def _of_cpu(report: WeightsReport) -> Iterator[Target]:
    cost = {(figures["codec"], figures["path"]): figures for figures in report.cpu}
    for codec, path, encode, decode in (
        ("rice", "numpy", 9.0, 6.0),
        ("rice", "avx512", 3.0, 3.0),
        ("rice_ctx", "avx512", 14.0, 6.0),
    ):
        if (codec, path) in cost:
            name, figures = f"{codec.upper()} {{}}, {path}, memcpys", cost[codec, path]
            yield Target(name.format("encode"), figures["encode"], encode)
            yield Target(name.format("decode + apply"), figures["decode_apply"], decode)
    best = _best(path for codec, path in cost if codec == "rice")
    if best is not None:
        dense = cost["dense XOR + zstd-1", "peer"]
        yield Target(
            "RICE encode / dense XOR + zstd-1 encode", cost["rice", best]["encode"] / dense["encode"], 1 / 3
        )
        for codec in ("rice", "rice_ctx"):
            yield Target(
                f"verification / {codec.upper()} decode + apply",
                report.snapshot["verify"] / cost[codec, best]["decode_apply"],
                0.15,
            )


def _best(paths: Iterable[str]) -> str | None:
    """The widest instructions that were measured."""
    measured = set(paths)
    return next((isa.name.lower() for isa in reversed(Isa) if isa.name.lower() in measured), None)

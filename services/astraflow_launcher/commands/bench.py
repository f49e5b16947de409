"""`astraflow bench`: what the parts of the system cost on this machine, beside peers' methods or physical limits."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from astraflow_launcher.bench import weights as measure
from astraflow_launcher.bench.model_pairs import Versions, simulated, trained
from astraflow_launcher.bench.weights import Report, Target
from astraflow_weights import kernel
from astraflow_weights.kernel import Isa

app = typer.Typer(add_completion=False, no_args_is_help=True)

_LEARNING_RATES = [3e-7, 1e-6, 3e-6, 1e-5]
_CPU_LEARNING_RATE = 1e-6
_MERGE_SPAN = 8
# Of the time to read both copies once; holds for GPUs.
_MOST_READS = 2.0


@app.callback()
def bench() -> None:
    """Measure parts of the system on this machine."""


@app.command()
def weights(
    elements: Annotated[int, typer.Option(min=1024, help="Weights of the simulated model.")] = 2**26,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="Learning rate of the step; repeat it. Decides the density.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Tries of each timing; the least counts.")] = 5,
    train_steps: Annotated[
        int, typer.Option(min=0, help="Steps of the small model that is really trained; 0 leaves it out.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/bench.md.")] = False,
) -> None:
    """Bytes and CPU of weight versions, against entropy bounds, peers' encodings and one memcpy.

    Status 1: a target was missed.
    """
    rates = learning_rate or _LEARNING_RATES
    report = _measure(elements=elements, rates=rates, repeats=repeats, train_steps=train_steps, seed=seed)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report) | {"targets": _targets_as_json(report)}, indent=2))
    else:
        _print(report)
    if not all(target.met for target in report.targets):
        raise typer.Exit(1)


@app.command()
def detect(
    device: Annotated[str, typer.Option(help="cpu, or cuda for the first GPU.")] = "cpu",
    elements: Annotated[
        int | None,
        typer.Option(min=1024, help="Weights. Default: those of an 8B model on a GPU, 2^24 on a CPU."),
    ] = None,
    density: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share that changes.")] = 0.01,
    repeats: Annotated[int, typer.Option(min=1, help="Tries of each timing; the least counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/bench.md.")] = False,
) -> None:
    """Finding and compacting the changes of an 8B-shaped model, against reading both copies of it once.

    Status 1: on a GPU, the target was missed.
    """
    # torch takes seconds to import.
    from astraflow_launcher.bench.detection import DEFAULT_ELEMENTS, measure_detection

    if device not in DEFAULT_ELEMENTS:
        raise typer.BadParameter(
            f"{device!r} is neither of {', '.join(DEFAULT_ELEMENTS)}", param_hint="--device"
        )
    try:
        report = measure_detection(
            num_elements=elements or DEFAULT_ELEMENTS[device],
            density=density,
            device=device,
            repeats=repeats,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    met = report.over_read <= _MOST_READS
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report) | {"limit": _MOST_READS, "met": met}, indent=2))
    else:
        Console().print(
            f"{report.num_elements / 1e6:.0f} M weights, {100 * report.density:.2f} % changed; {report.device}; "
            f"copies {report.copy_bytes_per_s / 1e9:.1f} GB/s\n"
            f"detect and compact {1e3 * report.detect_s:.2f} ms = {report.over_read:.2f} readings of both copies "
            f"(limit {_MOST_READS:g} on a GPU)\n"
            f"to the host: {report.bytes_to_host / 1e6:.2f} MB in {1e3 * report.to_host_s:.2f} ms"
        )
    if device == "cuda" and not met:
        raise typer.Exit(1)


def _measure(*, elements: int, rates: list[float], repeats: int, train_steps: int, seed: int) -> Report:
    chain = simulated(
        num_elements=elements, learning_rate=_CPU_LEARNING_RATE, num_versions=_MERGE_SPAN + 1, seed=seed
    )
    watch = measure.stopwatch(chain.models[-1], repeats=repeats)
    size_bytes = sum(bits.nbytes for bits in chain.models[-1].values())
    report = Report(
        kernel=kernel.describe(),
        num_elements=size_bytes // 2,
        memcpy_bytes_per_s=size_bytes / watch.memcpy_s,
    )
    report.merge = measure.merge_figures(chain, watch)
    last = Versions(source=chain.source, learning_rate=chain.learning_rate, models=chain.models[-2:])
    del chain
    for isa in (None, *_available()):
        report.cpu += measure.delta_cpu(last, watch, isa=isa)
    report.cpu += measure.peer_cpu(last, watch)
    report.snapshot = measure.snapshot_figures(last, watch)
    report.snapshot["verify"] = measure.verify_cpu(last, watch)
    for rate in rates:
        pair = simulated(num_elements=elements, learning_rate=rate, num_versions=2, seed=seed)
        report.deltas.append(measure.delta_bytes(pair))
    if train_steps:
        pairs = trained(learning_rates=rates, warm_up_steps=2 * train_steps, steps=train_steps, seed=seed)
        report.deltas += [measure.delta_bytes(pair) for pair in pairs]
    report.targets = _targets(report)
    return report


def _available() -> list[Isa]:
    loaded = kernel.active()
    return [] if loaded is None else [isa for isa in Isa if isa <= loaded.isa]


# ---------------------------------------------------------------- targets


def _targets(report: Report) -> list[Target]:
    simulated_deltas = [figures for figures in report.deltas if figures["source"] == "simulated"]
    targets = [target for figures in simulated_deltas for target in _byte_targets(figures)]
    targets += [
        Target("merged delta / sum of its members", report.merge["over_sum"], 0.55),
        Target("snapshot / safetensors", report.snapshot["over_safetensors"], 0.69),
    ]
    return targets + _cpu_targets(report)


def _byte_targets(figures: dict[str, Any]) -> list[Target]:
    at = f" at {100 * figures['density']:.2f} %"
    targets = []
    if 0.003 <= figures["density"] <= 0.07:
        targets.append(Target("RICE / entropy bound" + at, figures["rice_over_bound"], 1.02))
    if figures["density"] <= 0.026:
        targets += [
            Target("RICE_CTX / entropy bound" + at, figures["rice_ctx_over_bound"], 0.75),
            Target("RICE_CTX / context bound" + at, figures["rice_ctx_over_context_bound"], 1.06),
        ]
    if abs(figures["learning_rate"] / _CPU_LEARNING_RATE - 1) < 1e-6:
        over = figures["over_peer"]
        targets += [
            Target("RICE_CTX / dense XOR + zstd-1" + at, over["dense XOR + zstd-1"]["rice_ctx"], 0.34),
            Target(
                "RICE_CTX / u16 gaps + XOR + zstd-1" + at, over["u16 gaps + XOR + zstd-1"]["rice_ctx"], 0.51
            ),
        ]
    return targets


def _cpu_targets(report: Report) -> list[Target]:
    cost = {(figures["codec"], figures["path"]): figures for figures in report.cpu}
    targets = []
    for codec, path, encode, decode in (
        ("rice", "numpy", 9.0, 6.0),
        ("rice", "avx512", 3.0, 3.0),
        ("rice_ctx", "avx512", 14.0, 6.0),
    ):
        figures = cost.get((codec, path))
        if figures:
            name = f"{codec.upper()} {{}}, {path}, memcpys"
            targets.append(Target(name.format("encode"), figures["encode"], encode))
            targets.append(Target(name.format("decode + apply"), figures["decode_apply"], decode))
    best = next(
        (cost["rice", isa.name.lower()] for isa in reversed(Isa) if ("rice", isa.name.lower()) in cost), None
    )
    if best:
        dense = cost["dense XOR + zstd-1", "peer"]
        targets += [
            Target("RICE encode / dense XOR + zstd-1 encode", best["encode"] / dense["encode"], 1 / 3),
            Target(
                "verification / RICE decode + apply", report.snapshot["verify"] / best["decode_apply"], 0.15
            ),
        ]
    return targets


def _targets_as_json(report: Report) -> list[dict[str, Any]]:
    return [dataclasses.asdict(target) | {"met": target.met} for target in report.targets]


# ---------------------------------------------------------------- for people


def _print(report: Report) -> None:
    console = Console()
    console.print(
        f"{report.num_elements / 1e6:.0f} M weights; {report.kernel}; "
        f"memcpy {report.memcpy_bytes_per_s / 1e9:.1f} GB/s of CPU time\n"
    )
    console.print(_bytes_table(report))
    console.print(_cpu_table(report))
    merge, snapshot = report.merge, report.snapshot
    console.print(
        f"merging {merge['span']}: {merge['over_sum']:.3f} of the sum, {merge['merge']:.1f} memcpys, "
        f"applied in {merge['apply_merged']:.1f}\n"
        f"snapshot: {snapshot['over_safetensors']:.3f} of safetensors, written in {snapshot['encode']:.1f} memcpys, "
        f"read in {snapshot['decode']:.1f}\nverification: {snapshot['verify']:.2f} memcpys\n"
    )
    table = Table("target", "measured", "limit", "", box=None, padding=(0, 2), header_style="dim")
    for target in report.targets:
        met = "[green]met[/]" if target.met else "[red]missed[/]"
        table.add_row(target.name, f"{target.measured:.3f}", f"{target.limit:.3f}", met)
    console.print(table)


def _bytes_table(report: Report) -> Table:
    names = list(report.deltas[0]["bytes_per_change"])
    columns = ["source", "learning rate", "density", "bound", "with context", *names]
    table = Table(*columns, title="bytes per changed weight", box=None, padding=(0, 1), header_style="dim")
    for figures in report.deltas:
        table.add_row(
            figures["source"],
            f"{figures['learning_rate']:g}",
            f"{100 * figures['density']:.2f} %",
            f"{figures['bound_bytes_per_change']:.3f}",
            f"{figures['context_bound_bytes_per_change']:.3f}",
            *(f"{figures['bytes_per_change'][name]:.3f}" for name in names),
        )
    return table


def _cpu_table(report: Report) -> Table:
    title = f"CPU in memcpys of the model, learning rate {_CPU_LEARNING_RATE:g}"
    columns = ["codec", "path", "encode", "decode + apply"]
    table = Table(*columns, title=title, box=None, padding=(0, 2), header_style="dim")
    for figures in report.cpu:
        decode = figures.get("decode_apply")
        cells = f"{figures['encode']:.1f}", "" if decode is None else f"{decode:.1f}"
        table.add_row(figures["codec"], figures["path"], *cells)
    return table

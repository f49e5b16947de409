"""`astraflow bench`: what the parts of the system cost on this machine, beside peers' methods or physical limits."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Annotated

import typer
from rich.console import Console

from astraflow_bench.commands.bench_dataflow import dataflow
from astraflow_bench.commands.bench_policies import policies
from astraflow_bench.commands.bench_rewards import rewards
from astraflow_bench.commands.bench_rollout import rollout
from astraflow_bench.commands.bench_tls import tls
from astraflow_bench.commands.bench_traces import traces
from astraflow_bench.commands.bench_trainer import trainer
from astraflow_bench.commands.bench_wan import wan
from astraflow_bench.commands.results_folder import AsJson, WriteFolder
from astraflow_bench.machine import Origin
from astraflow_bench.weights import benchmark as measure
from astraflow_bench.weights import experts
from astraflow_bench.weights import report as weight_report
from astraflow_bench.weights.benchmark import WeightsReport
from astraflow_bench.weights.model_pairs import Versions, learning_rate_of, simulated, trained
from astraflow_bench.weights.targets import USUAL_LEARNING_RATE, targets
from astraflow_weights.codec import kernel
from astraflow_weights.codec.kernel import Isa

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(wan)
app.command()(dataflow)
app.command()(policies)
app.command()(rewards)
app.command()(rollout)
app.command()(tls)
app.command()(traces)
app.command()(trainer)

_LEARNING_RATES = [3e-7, 1e-6, 3e-6, 1e-5]
_MERGE_SPAN = 8
_ELEMENTS = 100 * 2**20
# Of the time to read both copies once; holds for GPUs.
_MOST_READS = 2.0


@app.callback()
def bench() -> None:
    """Measure parts of the system on this machine."""


@app.command()
def weights(
    elements: Annotated[int, typer.Option(min=1024, help="Weights of the simulated model.")] = _ELEMENTS,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Learning rate of the step; repeat it. Decides the density. Default: 3e-7 to 1e-5."
        ),
    ] = None,
    density: Annotated[
        list[float] | None,
        typer.Option(help="Share of weights that a simulated step changes, beside those rates; repeat it."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Tries of each timing; the least counts.")] = 5,
    train_steps: Annotated[
        int, typer.Option(min=0, help="Steps of the small model that is really trained; 0 leaves it out.")
    ] = 60,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    as_json: AsJson = False,
    write: WriteFolder = None,
) -> None:
    """Bytes and CPU of weight versions, against entropy bounds, peers' encodings and one memcpy.

    Status 1: a target was missed.
    """
    rates = learning_rate or _LEARNING_RATES
    simulated_rates = [*rates, *(learning_rate_of(share, seed=seed) for share in density or ())]
    report = _measure(
        elements=elements,
        rates=rates,
        simulated_rates=simulated_rates,
        repeats=repeats,
        train_steps=train_steps,
        seed=seed,
    )
    found = targets(report)
    if write is not None:
        chosen = [
            ("--elements", elements, _ELEMENTS),
            ("--repeats", repeats, 5),
            ("--train-steps", train_steps, 60),
        ]
        words = [word for flag, value, usual in chosen if value != usual for word in (flag, str(value))]
        words += [word for rate in learning_rate or () for word in ("--learning-rate", str(rate))]
        words += [word for share in density or () for word in ("--density", str(share))]
        command = shlex.join(["astraflow", "bench", "weights", *words, "--write", "docs/results"])
        weight_report.write_page(report, found, folder=write, origin=Origin.here(), command=command)
    if as_json:
        typer.echo(json.dumps(weight_report.as_json(report, found), indent=2))
    else:
        weight_report.print_report(report, found)
    if not all(target.met for target in found):
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
    as_json: AsJson = False,
) -> None:
    """Finding and compacting the changes of an 8B-shaped model, against reading both copies of it once.

    Status 1: on a GPU, the target was missed.
    """
    # torch takes seconds to import.
    from astraflow_bench.weights.detection import DEFAULT_ELEMENTS, measure_detection

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


def _measure(
    *,
    elements: int,
    rates: list[float],
    simulated_rates: list[float],
    repeats: int,
    train_steps: int,
    seed: int,
) -> WeightsReport:
    chain = simulated(
        num_elements=elements, learning_rate=USUAL_LEARNING_RATE, num_versions=_MERGE_SPAN + 1, seed=seed
    )
    watch = measure.Stopwatch(chain.models[-1], repeats=repeats)
    size_bytes = sum(bits.nbytes for bits in chain.models[-1].values())
    report = WeightsReport(kernel=kernel.describe(), num_elements=size_bytes // 2)
    report.merge = measure.merge_figures(chain, watch)
    last = Versions(source=chain.source, learning_rate=chain.learning_rate, models=chain.models[-2:])
    del chain
    for isa in (None, *_available()):
        report.cpu += measure.delta_cpu(last, watch, isa=isa)
    report.cpu += measure.peer_cpu(last, watch)
    report.two_threads = measure.two_threads(last, repeats=repeats)
    report.snapshot = measure.snapshot_figures(last, watch)
    report.snapshot["verify"] = measure.verify_cpu(last, watch)
    report.memcpy_bytes_per_s = size_bytes / watch.memcpy_s
    report.experts = _experts(elements, seed=seed)
    del last, watch
    for rate in simulated_rates:
        pair = simulated(num_elements=elements, learning_rate=rate, num_versions=2, seed=seed)
        report.deltas.append(measure.delta_bytes(pair))
    if train_steps:
        pairs = trained(learning_rates=rates, warm_up_steps=2 * train_steps, steps=train_steps, seed=seed)
        report.deltas += [measure.delta_bytes(pair) for pair in pairs]
    return report


def _experts(elements: int, *, seed: int) -> list[measure.Figures]:
    """Experts of real size, unless the whole benchmark is smaller than one of them."""
    rows, columns = experts.MATRIX
    matrix = (rows, columns) if elements >= rows * columns else (64, 64)
    return [
        experts.expert_bytes(
            experts.expert_step(density=density, matrix=matrix, seed=seed), density=density, seed=seed
        )
        for density in experts.DENSITIES
    ]


def _available() -> list[Isa]:
    loaded = kernel.active()
    return [] if loaded is None else [isa for isa in Isa if isa <= loaded.isa]

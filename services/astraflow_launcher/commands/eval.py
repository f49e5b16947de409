"""`astraflow eval RECIPE`: a run without training, shown as a table of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.commands import wording
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe, load_recipe
from astraflow_launcher.commands.local_run import (
    AsJson,
    DataDir,
    Engine,
    EnginePython,
    Environments,
    Overrides,
    Quiet,
    RecipeArgument,
    Seed,
    Serve,
    conduct,
    node_options,
    own_folder,
)
from astraflow_launcher.run.development_run import Options
from astraflow_launcher.run.starting_weights import weight_overrides
from astraflow_launcher.support.recipe_trial import require_heldout
from astraflow_launcher.view.metrics_file import to_json
from astraflow_launcher.view.summary import Summary

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(add_completion=False)

INCOMPLETE = 1

_TASKS, _SAMPLES = "dataflow.evaluation.final_samples", "dataflow.evaluation.samples_per_task"


@dataclass(frozen=True)
class _Weights:
    """What the policies start from, as asked for."""

    sources: Sequence[str]
    run: str | None
    version: int | None


@app.command("eval")
def evaluate(
    recipe: RecipeArgument = Path("quickstart"),
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[POLICY=]FOLDER|NAME|RUN|URI",
            help="Model folder, hub name, run of `astraflow dev`, or store. Default: the recipe's. Repeatable.",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="The run in a store.")] = None,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Version of the run. Default: the newest.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks. Default: the recipe's final_samples.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of each task. Default: the recipe's.")
    ] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="End with what there is after this time.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=64, help="RaaS nodes, each with an engine per policy.")
    ] = 1,
    serve: Serve = "",
    engine: Engine = "",
    engine_python: EnginePython = None,
    environment: Environments = None,
    data_dir: DataDir = None,
    as_json_: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Score weights on RECIPE's held-out tasks: mean reward, avg@k and pass@k, by source. Nothing is trained.

    Starts what it needs on this machine and ends it, as `astraflow dev` does. Status 1: some samples have no result.

    Example: astraflow eval quickstart --weights .astraflow/runs/quickstart-20260101-120000 --tasks 256 --samples 8
    """
    given = {"run.seed": ("--seed", seed), _TASKS: ("--tasks", tasks), _SAMPLES: ("--samples", samples)}
    loaded = _load(
        recipe,
        overrides or [],
        options={key: (option, str(value)) for key, (option, value) in given.items() if value is not None},
        weights=_Weights(weights or [], run, version),
    )
    of_nodes, _ = node_options(
        loaded.recipe, serve=serve, engine=engine, engine_python=engine_python, environments=environment or []
    )
    require_heldout(loaded)
    folder, console = own_folder(loaded, data_dir), wording.terminal(stderr=True)
    options = Options(loaded=loaded, num_nodes=nodes, node_options=of_nodes, timeout_s=timeout)
    with folder.lock:
        summary = conduct(options, folder, console, quiet=quiet)
        text = to_json(found := _found(summary, run_id=folder.record.run_id, recipe=loaded.recipe))
        folder.summary.write_text(text + "\n")
    if as_json_:
        typer.echo(text)
    elif found["scores"]:
        wording.console().print(_as_table(found))
    if found["scores"] and not quiet:
        scored = (f"{policy}: {_start_text(model)}" for policy, model in found["weights"].items())
        for line in (*scored, f"each sample: {folder.samples}"):
            console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    for line in _troubles(found):
        console.print(line, style="bold red", markup=False, soft_wrap=True)
    if not found["complete"]:
        raise typer.Exit(INCOMPLETE)


def _load(
    recipe: Path, overrides: Sequence[str], *, options: dict[str, tuple[str, str]], weights: _Weights
) -> LoadedRecipe:
    """The recipe with all overrides, from the weights to evaluate; errors name the options."""
    names = {key: option for key, (option, _) in options.items()}
    given = [*overrides, *(f"{key}={value}" for key, (_, value) in options.items()), "run.steps=0"]
    loaded = load_recipe(recipe, overrides=given, options=names)
    models = weight_overrides(loaded.recipe, weights.sources, run=weights.run, version=weights.version)
    given += [f"{key}={model}" for key, model in models.items()]
    return load_recipe(recipe, overrides=given, options=names | dict.fromkeys(models, "--weights"))


def _found(summary: Summary, *, run_id: str, recipe: Recipe) -> dict[str, Any]:
    """The final JSON object."""
    samples = summary.heldout_samples or {"planned": 0, "results": 0, "per_task": 0}
    return {
        "run_id": run_id,
        "complete": 0 < samples["planned"] <= samples["results"],
        "weights": {
            name: recipe.policy(name).model.model_dump(mode="json", exclude_none=True)
            for name in recipe.policies
            if name not in recipe.snapshots
        },
        "samples": samples,
        "scores": summary.heldout_scores,
        "metrics": summary.heldout_metrics,
        "failures": summary.failures,
        "stopped_for": summary.stopped_for,
        "wall_s": summary.wall_s,
        "data_dir": summary.data_dir,
    }


def _start_text(model: dict[str, Any]) -> str:
    """What a policy started from."""
    start = model.get("from_version")
    if start is not None:
        return f"version {start['version']} (step {start['step']}) of run {start['run']} in {start['store']}"
    return str(model.get("path") or f"as the recipe begins ({next(iter(model))})")


def _as_table(found: dict[str, Any]) -> Table:
    """A row for each policy, and below it for each source of its tasks."""
    ks = sorted({item["k"] for score in found["scores"] for item in score["pass_at_k"]})
    per_task = found["samples"]["per_task"]
    numbers = ("tasks", "n", "score", f"avg@{per_task}", *(f"pass@{k}" for k in ks), "truncated")
    table = wording.table("policy", "source", *numbers, right=numbers)
    for score in found["scores"]:
        passed = {item["k"]: f"{item['value']:.3f}" for item in score["pass_at_k"]}
        table.add_row(
            score["policy_id"],
            score["source"] or "all",
            str(score["num_tasks"]),
            str(score["num_samples"]),
            f"{score['mean_reward']:.3f}",
            f"{score['avg_at_k']:.3f}",
            *(passed.get(k, "–") for k in ks),
            f"{score['truncated_fraction']:.1%}",
        )
    return table


def _troubles(found: dict[str, Any]) -> list[str]:
    """What keeps the scores from being those of every sample; nothing when they are."""
    if found["complete"]:
        return []
    samples = found["samples"]
    results = f"{samples['results']} of {samples['planned']} samples have a result"
    if found["stopped_for"]:
        return [f"the run was stopped: {found['stopped_for']}", f"{results}; logs: {found['data_dir']}/logs"]
    lines = [
        f"failed {item['count']} times, first {item['task_id']}: {item['reason']}: {item['detail']}"
        for item in found["failures"][:3]
    ]
    return [*lines, f"{results}; go on with --data-dir {found['data_dir']}, or look into its logs"]

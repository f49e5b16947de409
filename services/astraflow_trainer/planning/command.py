"""`astraflow trainer --plan`: how much memory a rank needs for a policy of a recipe, as a table or as JSON.

Reads the recipe and the model's configuration, joins nothing and allocates nothing. Called by `__main__`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
import typer

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import ResolvedPolicy, file
from astraflow_kit.lifecycle import ExitCode
from astraflow_trainer.model.model import ModelShape, config_of
from astraflow_trainer.model.sharding import compute_of, placement_of
from astraflow_trainer.planning.memory_plan import MemoryPlan, RankLayout, memory_plan, size_of

if TYPE_CHECKING:
    from astraflow_trainer.settings import TrainerSettings


def show(settings: TrainerSettings) -> int:
    """Print the plan. Raises InvalidArgumentError for what cannot fit, and for what cannot be planned."""
    policy = _policy(settings)
    on_gpu = settings.plan_on == "gpu"
    ranks = RankLayout(num_ranks=settings.plan_ranks, num_replicas=settings.replicas, on_gpu=on_gpu)
    compute = compute_of(policy.trainer.compute, on_gpu=on_gpu)
    plan = memory_plan(
        model_config(policy),
        policy.trainer,
        ranks=ranks,
        placement=placement_of(settings, compute=compute),
        snapshot=settings.publish_snapshot,
    )
    typer.echo(_as_json(plan) if settings.plan_json else _as_table(plan))
    if settings.plan_memory_gib:
        plan.require_room(int(settings.plan_memory_gib * 2**30), memory="device" if on_gpu else "host")
    return ExitCode.OK


def model_config(policy: ResolvedPolicy) -> transformers.PreTrainedConfig:
    """The configuration of a policy's model, without its weights. Raises InvalidArgumentError where there is none."""
    model = policy.model
    if policy.lora is not None:
        raise InvalidArgumentError(
            f"policy {policy.policy_id!r} is an adapter; plan the policy that it adapts ({policy.lora.of!r}), whose "
            "masters, moments and gradients an adapter does without"
        )
    if model.architecture is not None:
        words = policy.vocab_size or 1
        return config_of(ModelShape(vocab_size=words, **model.architecture.model_dump()))
    if model.path is None:
        raise InvalidArgumentError(
            f"policy {policy.policy_id!r} begins with a version of another run; plan that run's recipe"
        )
    found: transformers.PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        Path(model.path).expanduser()
    )
    return found


def _policy(settings: TrainerSettings) -> ResolvedPolicy:
    if settings.recipe is None:
        raise InvalidArgumentError("--plan needs --recipe FILE, or the name of a recipe of this release")
    recipe = file.load_recipe(settings.recipe, overrides=settings.recipe_overrides).recipe
    names = [name for name in recipe.policies if recipe.policy(name).train]
    name = settings.policy or (names[0] if len(names) == 1 else "")
    if name not in recipe.policies:
        raise InvalidArgumentError(f"--policy is {name!r}; {settings.recipe} trains {', '.join(names)}")
    return recipe.policy(name)


def _as_json(plan: MemoryPlan) -> str:
    totals = {memory: plan.total(memory) for memory in ("device", "host")}
    content = {"num_parameters": plan.num_parameters, "ranks": asdict(plan.ranks), "total": totals}
    return json.dumps({**content, "items": [asdict(item) for item in plan.items]}, indent=2)


def _as_table(plan: MemoryPlan) -> str:
    rows = [(item.name, item.memory, size_of(item.num_bytes), item.arithmetic) for item in plan.items]
    rows += [("total", memory, size_of(plan.total(memory)), "") for memory in ("device", "host")]
    width = max(len(row[0]) for row in rows)
    ranks = plan.ranks
    head = f"{plan.num_parameters:,} parameters, {ranks.num_ranks} ranks, {ranks.num_replicas} replicas; a rank needs"
    lines = [f"{name:{width}}  {memory:6}  {size:>10}  {how}".rstrip() for name, memory, size, how in rows]
    return "\n".join([head, *lines])

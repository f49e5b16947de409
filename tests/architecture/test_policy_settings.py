"""What a policy may set for itself is read through `Recipe.policy`, so that no daemon takes the run's value for it."""

import ast
import re
from collections.abc import Iterator

from astraflow.recipe import BatchSettings, TrainerSettings
from support.source_tree import source_modules

RESOLVED = {
    "run": {"steps"},
    "dataflow": set(BatchSettings.model_fields),
    "trainer": set(TrainerSettings.model_fields),
}
"""Keys of each section of a recipe that differ by policy."""
RESOLVER = "clients/python/astraflow/recipe/settings.py"


def test_settings_of_a_policy_are_read_resolved() -> None:
    readers = [module for module in source_modules() if module.name != RESOLVER]
    wrong = [f"{module.name}:{found}" for module in readers for found in direct_reads(module.tree)]
    assert not wrong, f"read these from `recipe.policy(policy_id)`: {wrong}"


def test_the_rule_sees_direct_reads_and_reads_through_a_name() -> None:
    text = """
def first(context):
    return context.recipe.dataflow.max_staleness, context.recipe.dataflow.group_size

def second(loaded):
    flow = loaded.recipe.dataflow
    training = loaded.recipe.trainer
    return flow.groups_per_step, flow.lease_ttl_s, loaded.recipe.run.steps, training.optimizer

def third(joined):
    return joined.policy.trainer.optimizer, joined.recipe.policy("p").trainer.publish
"""
    by_name = ["8 flow.groups_per_step", "8 loaded.recipe.run.steps", "8 training.optimizer"]
    assert list(direct_reads(ast.parse(text))) == ["3 context.recipe.dataflow.max_staleness", *by_name]


def direct_reads(tree: ast.AST) -> Iterator[str]:
    """Line and text of each read of such a key from the recipe's own sections."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    sections = {ast.unparse(target): _section(node.value) for node in assigned for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            section = _section(node.value) or sections.get(ast.unparse(node.value), "")
            if node.attr in RESOLVED.get(section, ()):
                yield f"{node.lineno} {ast.unparse(node)}"


def _section(node: ast.AST) -> str:
    """Which section `….recipe.<section>` or `recipe.<section>` is; empty when an expression is something else."""
    found = re.fullmatch(rf"(?:.*\.)?recipe\.({'|'.join(RESOLVED)})", ast.unparse(node))
    return found[1] if found else ""

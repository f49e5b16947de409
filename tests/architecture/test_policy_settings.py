"""What a policy may set for itself is read through `Recipe.policy`, so that no daemon takes the run's value for it."""

import ast
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
    wrong = [
        f"{module.name}:{found}"
        for module in source_modules()
        if module.name != RESOLVER
        for found in direct_reads(module.tree)
    ]
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
    assert list(direct_reads(ast.parse(text))) == [
        "3 context.recipe.dataflow.max_staleness",
        "8 flow.groups_per_step",
        "8 loaded.recipe.run.steps",
        "8 training.optimizer",
    ]


def direct_reads(tree: ast.AST) -> Iterator[str]:
    """Line and text of each read of such a key from the recipe's own sections."""
    sections = {
        target.id: node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_section(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Attribute)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        section = owner.attr if isinstance(owner, ast.Attribute) and _is_section(owner) else None
        if isinstance(owner, ast.Name):
            section = sections.get(owner.id)
        if section is not None and node.attr in RESOLVED[section]:
            yield f"{node.lineno} {ast.unparse(node)}"


def _is_section(node: ast.AST) -> bool:
    """Whether an expression is `….recipe.<section>` or `recipe.<section>`."""
    if not isinstance(node, ast.Attribute) or node.attr not in RESOLVED:
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)) == "recipe"

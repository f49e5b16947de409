"""The metric table and the code agree."""

import ast

from astraflow_kit.metric_schema import SCHEMA, Kind
from support.source_tree import SERVICES, modules

_UNBOUNDED = {"task_id", "trajectory_id", "episode_id", "batch_id", "group_id", "step", "version"}
_METHODS = {"increment": Kind.COUNTER, "set": Kind.GAUGE, "add": Kind.GAUGE, "observe": Kind.HISTOGRAM}


def _uses() -> dict[str, set[Kind]]:
    """Every metric named as a literal in a call of a `Metrics` method."""
    found: dict[str, set[Kind]] = {}
    for module in modules(SERVICES):
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            name = node.args[0]
            is_metric = isinstance(name, ast.Constant) and str(name.value).startswith("astraflow_")
            if node.func.attr in _METHODS and is_metric:
                found.setdefault(str(ast.literal_eval(name)), set()).add(_METHODS[node.func.attr])
    return found


def test_every_metric_used_is_declared_with_that_kind() -> None:
    uses = _uses()
    assert uses, "no use was found: the search is broken"
    wrong = {
        name: kinds for name, kinds in uses.items() if name not in SCHEMA or kinds != {SCHEMA[name].kind}
    }
    assert not wrong, f"declare these in metric_schema.py with that kind: {wrong}"


def test_every_name_follows_the_rules() -> None:
    for name, entry in SCHEMA.items():
        assert name == entry.name
        assert name.startswith("astraflow_")
        assert name.endswith("_total") == (entry.kind is Kind.COUNTER), name
        assert entry.help.endswith("."), name
        assert not _UNBOUNDED & set(entry.labels), name
        assert list(entry.buckets) == sorted(set(entry.buckets)), name

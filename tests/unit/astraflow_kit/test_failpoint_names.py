"""The failpoint table and the code agree."""

import ast
import re

from astraflow_kit.failpoint_names import KNOWN
from support.source_tree import SERVICES, modules


def _hits() -> set[str]:
    """Every name given as a literal to `hit` or `failpoints.hit`."""
    calls = [
        node
        for module in modules(SERVICES)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] == "hit"
    ]
    return {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}


def test_every_failpoint_in_the_code_is_in_the_table() -> None:
    missing = _hits() - KNOWN.keys()
    assert not missing, f"add these to failpoint_names.py, each with its moment: {sorted(missing)}"


def test_every_failpoint_in_the_table_is_in_the_code() -> None:
    unused = KNOWN.keys() - _hits()
    assert not unused, f"nothing hits these, remove them from failpoint_names.py: {sorted(unused)}"


def test_names_are_daemon_dot_moment_with_a_reason() -> None:
    for name, why in KNOWN.items():
        assert re.fullmatch(r"(dataflow|raas|trainer|weights|engine)(\.[a-z0-9_]+){1,2}", name), name
        assert why, name

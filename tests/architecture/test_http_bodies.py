"""Bodies of requests are read in one place, to a limit that its caller names."""

import ast
import re

from support.source_tree import Module, source_modules

READER = "services/astraflow_kit/http.py"
_READS = re.compile(r"\brequest\.(json|body|form|stream)\(|\buvicorn\.(run|Config|Server)\(")
_ROUTES = {"post", "put", "patch", "delete"}


def reads_by_itself(module: Module) -> list[str]:
    """Lines of a module that read a body without a limit, and routes whose parameters FastAPI would read one for."""
    found = [f"{module.name}: {match[0]}" for match in _READS.finditer(module.source)]
    for node in ast.walk(ast.parse(module.source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
        if any(isinstance(call, ast.Attribute) and call.attr in _ROUTES for call in calls):
            kinds = {ast.unparse(each.annotation) for each in node.args.args if each.annotation}
            found += [f"{module.name}: {node.name} takes {kind}" for kind in kinds - {"Request"}]
    return found


def test_no_http_app_reads_a_body_by_itself() -> None:
    found = [line for module in source_modules() if module.name != READER for line in reads_by_itself(module)]
    assert found == []

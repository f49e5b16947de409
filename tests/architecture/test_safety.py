"""What no module does: run code that came as data, read the environment outside settings, use a shell."""

import ast

import pytest

from support.source_tree import imported_names, recipe_modules, source_modules

UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# Settings read the environment; the launcher passes its own on to the processes it starts; agents get theirs by it.
ENVIRONMENT_READERS = (
    "settings.py",
    "astraflow_launcher/",
    "astraflow_bench/",
    "/failpoints.py",
    "/agent.py",
    "/verifiers_agent.py",
)
# Runs only within a sandbox, in a process made for it: what a sandbox is for.
IN_A_SANDBOX = {f"services/astraflow_raas/programs/{name}.py" for name in ("judge", "program")}
CODE = [*source_modules(), *recipe_modules()]


def test_nothing_runs_code_that_came_as_data() -> None:
    code = [module for module in CODE if module.name not in IN_A_SANDBOX]
    found = {module.name: hits for module in code if (hits := unsafe(module.tree))}
    assert not found, f"safetensors, JSON and protobuf carry data; these carry code: {found}"


def test_only_settings_read_the_environment() -> None:
    inside = [module for module in CODE if not any(place in module.name for place in ENVIRONMENT_READERS)]
    readers = [module.name for module in inside if reads_environment(module.tree)]
    assert not readers, f"pass a setting in instead of reading the environment: {readers}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_each_unsafe_form_is_seen(source: str) -> None:
    assert unsafe(ast.parse(source))


def test_the_safe_forms_pass() -> None:
    assert not unsafe(ast.parse("torch.load(path, weights_only=True); numpy.load(path); model.eval()"))


def unsafe(tree: ast.Module) -> list[str]:
    """`line: what` for every unsafe call in `tree`, and its unsafe imports."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [f"{call.lineno}: {what}" for call in calls if (what := unsafe_call(call))]
    return [*found, *(imported_names(tree) & UNSAFE_MODULES)]


def unsafe_call(call: ast.Call) -> str | None:
    """What is unsafe about one call, if anything."""
    flags = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    name = ast.unparse(call.func)
    if name in UNSAFE_CALLS:
        return name
    if name == "torch.load" and flags.get("weights_only") is not True:
        return "torch.load without weights_only=True"
    return next((flag for flag in ("allow_pickle", "shell") if flags.get(flag) is True), None)


def reads_environment(tree: ast.Module) -> bool:
    """Whether `os.environ` or `os.getenv` is named anywhere."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return not attributes.isdisjoint({"environ", "getenv"})

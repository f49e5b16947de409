"""What no module does: run code that came as data, read the environment outside settings, use a shell."""

import ast
import re

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
# An engine's Python may be older than -P: its environment says the same.
OWN_INTERPRETER = "services/astraflow_raas/engine/command.py"
READERS_OF_HTTP = {
    "services/astraflow_kit/http_answers.py": "to a limit",
    "services/astraflow_environment/tools.py": "by http_answers",
    "services/astraflow_environment/adapters/search.py": "by http_answers",
    "services/astraflow_raas/policies/external_model.py": "by http_answers",
    "services/astraflow_raas/engine/transport.py": "a node's own engines",
    "services/astraflow_raas/engine/connection_pools.py": "a node's own engines",
    "services/astraflow_environment/adapters/verifiers_agent.py": "its node's own list of models",
    "services/astraflow_launcher/support/bundle.py": "pages of our daemons, to a limit",
    "services/astraflow_launcher/commands/health.py": "pages of our daemons, to a limit",
}
# What judged code wrote, or did to stay alive, is removed here: who cannot, says so.
ROOMS_OF_JUDGED_CODE = (
    *("services/astraflow_kit/sandbox/", "services/astraflow_environment/terminal/"),
    *("services/astraflow_environment/adapters/terminal.py", "services/astraflow_raas/programs/"),
    *("services/astraflow_raas/agents/", "services/astraflow_raas/workflows/agent_process.py"),
)
SILENT = {
    "services/astraflow_kit/sandbox/groups.py": 2,  # files of old kernels that are not there; removing says what stays
    "services/astraflow_kit/sandbox/sessions.py": 1,  # a start that failed started nothing
}
BROAD = r"\b(OSError|PermissionError|Exception|BaseException)\b"
PASSES_OVER = re.compile(
    rf"ignore_errors=True|suppress\(.*{BROAD}|except( .*{BROAD}.*)?:\s*(pass|continue|return|\.\.\.)$", re.M
)
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


def test_every_child_that_is_a_python_leaves_the_current_folder_alone() -> None:
    ours = [module for module in source_modules() if module.name != OWN_INTERPRETER]
    found = {module.name: lines for module in ours if (lines := unsafe_children(module.tree))}
    assert not found, (
        f"start modules by astraflow_kit.parent.python, so that no file here is imported: {found}"
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('command = [sys.executable, "-m", "astraflow_raas"]', [1]),
        ('run(str(python), "-c", code)', [1]),
        ('run(python("astraflow_raas"))', []),
        ('run(sys.executable, "-P", "-m", "x"); run(path, "-I", "-c", "x")', []),
        ('words[1:3] == ["-m", module]', []),
    ],
)
def test_a_child_with_the_current_folder_is_seen(source: str, lines: list[int]) -> None:
    assert unsafe_children(ast.parse(source)) == lines


def unsafe_children(tree: ast.Module) -> list[int]:
    """Lines on which an interpreter's command line has a module or code, and neither -P nor -I."""
    found = []
    for node in ast.walk(tree):
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        words = [str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part) for part in parts]
        begins = {word for word in words[1:3] if word in ("-m", "-c")}
        if (
            begins
            and "python" in words[0].replace("sys.executable", "python")
            and not {"-P", "-I"} & {*words}
            and isinstance(node, ast.expr)
        ):
            found.append(node.lineno)
    return found


def test_answers_of_others_are_read_to_a_limit() -> None:
    readers = {m.name for m in CODE if m.imports() & {"httpx", "urllib.request", "aiohttp", "requests"}}
    unknown = {name for name in readers if "astraflow_bench/" not in name} - READERS_OF_HTTP.keys()
    assert not unknown, (
        f"read what others answer by astraflow_kit.http_answers, or say here why not: {unknown}"
    )


def test_what_judged_code_wrote_is_not_left_in_silence() -> None:
    judged = [module for module in source_modules() if module.name.startswith(ROOMS_OF_JUDGED_CODE)]
    found = {module.name: places for module in judged if (places := silent(module.tree))}
    assert {name: len(places) for name, places in found.items()} == SILENT, (
        f"raise, log, or say in SILENT why nobody needs to know: {found}"
    )


@pytest.mark.parametrize(
    ("source", "is_silent"),
    [
        ("shutil.rmtree(path, ignore_errors=True)", True),
        ("with suppress(OSError): path.unlink()", True),
        ("with contextlib.suppress(ValueError, Exception): path.unlink()", True),
        ("try: path.unlink()\nexcept: pass", True),
        ("for path in paths:\n try: path.unlink()\n except (OSError, ValueError): continue", True),
        ("def f():\n try: path.unlink()\n except PermissionError: return", True),
        ("try: path.unlink()\nexcept OSError as error: log.error(error)", False),
        ("with suppress(FileNotFoundError): path.unlink()", False),
        ("shutil.rmtree(path)", False),
    ],
)
def test_each_silent_form_is_seen(source: str, is_silent: bool) -> None:
    assert bool(silent(ast.parse(source))) is is_silent


def silent(tree: ast.Module) -> list[str]:
    """Where whatever the system refuses is passed over."""
    return [found[0] for found in PASSES_OVER.finditer(ast.unparse(tree))]


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

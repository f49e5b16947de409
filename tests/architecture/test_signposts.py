"""Signposts lead to code that runs: what pages and docstrings name exists, and the product imports it.

A page that calls a module "the code" of a promise misleads when only tests run that module; so does a docstring that
says who calls it when nobody of that name does.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from astraflow import cli
from support.source_tree import (
    CLIENT_ROOT,
    REPOSITORY,
    SERVICES,
    Module,
    docstrings,
    modules,
    recipe_modules,
    source_modules,
    tracked_files,
)

# Rooms whose modules a recipe names; the built-ins that a recipe may choose are imported by nobody.
PLUGIN_ROOMS = (
    *("astraflow_dataflow.plugins", "astraflow_raas.workflows", "astraflow_raas.rewards"),
    *("astraflow_environment.adapters", "astraflow_environment.tools"),
)
# Programs that people start by `python -m`.
PROGRAMS = ("astraflow_engine.changed_loader",)
# Called by a library by these names, never by us.
CALLED_BY_LIBRARIES = {
    "get_credentials_async",
    "list_commands", "resolve_command", "seekable", "capture_signals", "intercept_service",
    "add_generic_rpc_handlers", "add_registered_method_handlers",
    "action_show", "action_other_run", "action_pause", "compose", "on_mount", "on_resize", "on_unmount", "Export",
    "generate_trace_id", "TITLE", "CSS", "BINDINGS", "ENABLE_COMMAND_PALETTE",
}  # fmt: skip
# What a version log saw and passed over; a census of the store checks that it is right.
OBSERVED_IN_TESTS = {"num_ignored", "damaged_sweeps"}
DOTTED = re.compile(r"`(astraflow(?:_\w+)?(?:\.\w+)+)(?::(\w+))?(?:\(\))?`")
CODE_LINK = re.compile(r"\]\(([^)\s#]*\.py)\)")
FILE_NAME = re.compile(r"`((?:\w+/)*\w+\.(?:py|lua|proto|c))`")
VERBS = "[Cc]alled|[Mm]ade|[Rr]ead|[Rr]un|[Bb]uilt|[Dd]riven|[Uu]sed|[Ss]tarted|[Mm]arked|[Ll]oaded|[Oo]pened"
NAMES = r"(?:(?:, |,? and (?:by )?)?(?:the )?`[a-z_]\w*(?:\.\w+)*`)+"
CALLER = re.compile(rf"(?:{VERBS}) by ({NAMES})")
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LISTED = re.compile(r"[\w.:\[\], |]{1,199}")
NAME = re.compile(r"`([a-z_]\w*(?:\.\w+)*)`")
EXAMPLES = {"astraflow.NAME.v1", "recipe.py", "name.py"}
EXAMPLES |= {"services/astraflow_x/foo.py", "tests/unit/astraflow_x/test_foo.py"}


def dotted(module: Module) -> str:
    """The name by which a module is imported."""
    path = module.name.removeprefix("services/").removeprefix("clients/python/")
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def product() -> dict[str, Module]:
    return {dotted(module): module for module in source_modules()}


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module → modules that it imports, or names in a string, as `python -m` and lazy commands do."""
    return {name: frozenset(set(_edges(module.tree)) & set(product())) for name, module in product().items()}


def _edges(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"astraflow\w*(?:\.\w+)+", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield from _completions(node)


def _completions(node: ast.JoinedStr) -> Iterator[str]:
    """`f"astraflow_bench.wan.{role}"` may name any module of that room."""
    first = node.values[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        room = first.value.removesuffix(".")
        if first.value.endswith(".") and room in product():
            yield from (name for name in product() if name.startswith(first.value))


def examples() -> list[Module]:
    """Programs that show other people how to write their own."""
    return modules(CLIENT_ROOT / "examples")


@cache
def reachable() -> frozenset[str]:
    """Modules that a command, a daemon, an example or a recipe's plug-in name leads to, with their packages."""
    entries = [name for name in product() if name.endswith(".__main__") or name.startswith(PLUGIN_ROOMS)]
    todo, seen = ["astraflow.cli", *PROGRAMS, *entries], set[str]()
    todo += [command.module for command in cli.COMMANDS.values()]
    shown = [*examples(), *recipe_modules()]
    todo += [name for module in shown for name in _edges(module.tree) if name in product()]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imports()[name] | {name.rpartition(".")[0]} & product().keys()
    return frozenset(seen)


def pages() -> list[tuple[str, str]]:
    """(name, text) of README, docs and everything that a docstring says."""
    old = {"results", "CHANGELOG.md"}
    written = [path for path in tracked_files() if path.suffix == ".md" and old.isdisjoint(path.parts)]
    texts = [(path.relative_to(REPOSITORY).as_posix(), path.read_text()) for path in written]
    said = [(module.name, str(doc.value)) for module in source_modules() for doc in docstrings(module.tree)]
    return texts + said


def test_every_module_is_product_code() -> None:
    lost = sorted(set(product()) - reachable())
    assert not lost, f"no command, daemon or plug-in name leads to these; only tests use them: {lost}"


def test_every_public_name_is_used_by_the_product() -> None:
    uses = _uses() | CALLED_BY_LIBRARIES | OBSERVED_IN_TESTS
    defined = [(module.name, name) for module in source_modules() for name in _defined(module)]
    unused = [f"{module}: {name}" for module, name in defined if name not in uses]
    assert not unused, f"only tests use these; delete them or let the product use them: {unused}"


def _uses() -> set[str]:
    """Names that are read anywhere in the product, in strings too (annotations, `__all__`, plug-in names)."""
    uses = set[str]().union(*map(_read, [*source_modules(), *examples()]))
    for module in source_modules():
        texts = (str(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Constant))
        uses.update(name for text in texts if LISTED.fullmatch(text) for name in re.findall(r"\w+", text))
    return uses


def _defined(module: Module) -> Iterator[str]:
    """Names of public classes, functions and methods that nothing but a caller by name can reach."""
    name = dotted(module)
    if name.startswith(PLUGIN_ROOMS) or (name == "astraflow" or name.startswith("astraflow.")):
        return  # named by recipes, and the public package: its callers are other people's programs
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            if not any("Servicer" in ast.unparse(base) for base in node.bases):  # gRPC calls those
                yield from _plain_functions(node.body)
    yield from _plain_functions(module.tree.body)


def _plain_functions(body: list[ast.stmt]) -> Iterator[str]:
    """Functions that no decorator hands to a library."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            decorators = {ast.unparse(item) for item in node.decorator_list}
            if decorators <= {"property", "classmethod", "staticmethod"}:
                yield node.name


def test_links_lead_to_code_that_the_product_imports() -> None:
    used = {product()[name].path for name in reachable()}
    strays = [
        f"{page}: {target}"
        for page, text in pages()
        for target in CODE_LINK.findall(text)
        if (path := (REPOSITORY / page).parent.joinpath(target).resolve()) not in used
        and "services" in path.parts
        and path.name != "kernel_build_hook.py"
    ]
    assert not strays, f"these links lead to code that only tests use: {strays}"


def test_dotted_names_lead_somewhere() -> None:
    wrong = {
        f"{page}: {name}{':' + attribute if attribute else ''}"
        for page, text in pages()
        for name, attribute in DOTTED.findall(text)
        if name not in EXAMPLES and not exists(f"{name}.{attribute}" if attribute else name)
    }
    assert not wrong, f"no module, class or function has these names: {sorted(wrong)}"


def test_file_names_are_those_of_files() -> None:
    known = [path.relative_to(REPOSITORY).as_posix() for path in tracked_files()]
    named = {(page, name) for page, text in pages() for name in FILE_NAME.findall(text) if "_pb2" not in name}
    wrong = {
        f"{page}: {name}"
        for page, name in named
        if name not in EXAMPLES and not any(f"/{path}".endswith(f"/{name}") for path in known)
    }
    assert not wrong, f"no file ends with these names: {sorted(wrong)}"


def test_who_a_module_says_calls_it_does() -> None:
    said = {name: ast.get_docstring(module.tree) or "" for name, module in product().items()}
    named = [(name, caller) for name, text in said.items() for caller in callers_named(text)]
    wrong = [f"{name}: {caller}" for name, caller in named if not calls(caller, name)]
    assert not wrong, f"nobody of these names imports the module that says so: {wrong}"


def callers_named(docstring: str) -> Iterator[str]:
    """Back-quoted names in the sentences that say by whom a module is called, read, built or run."""
    for sentence in CALLER.findall(docstring.replace("\n", " ")):
        yield from (name.removesuffix(".py") for name in NAME.findall(sentence))


def calls(caller: str, callee: str) -> bool:
    """Whether a module or room that `caller` names imports `callee`, or uses what it defines (a value passed in)."""
    defined = _public(product()[callee])
    named = [name for name in product() if named_by(caller, name) and name != callee]
    return any(callee in imports()[name] or defined & _read(product()[name]) for name in named)


def named_by(caller: str, name: str) -> bool:
    """Whether `session`, `engine.http`, `lifecycle.begin` or the room `servicers` is the module `name` or holds it."""
    owner, _, attribute = caller.rpartition(".")
    parts = f".{name}."
    if f".{caller}." in parts:
        return True
    return bool(owner) and f".{owner}." in parts and attribute in _attributes(product()[name])


def _public(module: Module) -> set[str]:
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
    nodes = [*module.tree.body, *(node for owner in classes for node in owner.body)]
    names = [node.name for node in nodes if isinstance(node, DEFINITION)]
    return {name for name in names if not name.startswith("_")}


def _read(module: Module) -> set[str]:
    names = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines or imports."""
    is_generated = re.match(r"astraflow\.\w+\.v1\.|.*_pb2", name)
    if is_generated or name in product() or (SERVICES / name.replace(".", "/")).is_dir():
        return True
    module, _, attribute = name.rpartition(".")
    if module in product():
        return attribute in _attributes(product()[module])
    owner, _, method = module.rpartition(".")
    return owner in product() and method in _attributes(product()[owner])


def _attributes(module: Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, DEFINITION):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return found


def test_a_wrong_caller_is_seen() -> None:
    said = "Loads things. Called by `session` and `worker.py`; never blocks."
    assert list(callers_named(said)) == ["session", "worker"]
    assert not calls("no_such_module", "astraflow_kit.nearest")
    assert calls("lifecycle", "astraflow_kit.parent")


def test_a_name_without_a_module_is_seen() -> None:
    assert all(map(exists, ["astraflow.errors.NotFoundError", "astraflow_kit.nearest", "astraflow.cli"]))
    assert not exists("astraflow_kit.nearest.no_such_function")
    assert not exists("astraflow_nowhere.module")

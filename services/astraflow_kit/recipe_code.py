"""A run's own code on this machine: checked against its digest, written to a folder, only with leave.

Invariant: no byte of a recipe's code reaches the disk unless it came with this release, or the daemon was started with
leave to run any; the bundle has the digest that pins it, and every path stays inside its folder; a folder is complete
or absent. Every daemon that runs plug-ins calls it when it has joined a run.
"""

import re
import shutil
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath

from astraflow._contract.rpcs import bounds_of
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError
from astraflow.recipe.file import CodeFile, bundle_digest, read_code
from astraflow.recipe.shipped import shipped_recipes

_SAFE_PATH = re.compile(bounds_of(run_pb2.CodeFile, "path").pattern)


def read_bundle(bundle: run_pb2.CodeBundle, *, remedy: str) -> list[CodeFile]:
    """Return the files of a bundle.

    Raises RecipeError for a digest that is not the bundle's, with `remedy`, and for paths that leave their folder or
    that no folder can have together.
    """
    files = [CodeFile(file.path, file.content) for file in bundle.files]
    digest = bundle_digest(files)
    if files and digest != bundle.sha256:
        raise RecipeError(
            f"the recipe's code has digest {digest.hex()[:16]}…, the run pins {bundle.sha256.hex()[:16]}…; {remedy}"
        )
    for file in files:
        if not _SAFE_PATH.fullmatch(file.path):
            raise RecipeError(f"the recipe's code holds {file.path!r}; only plain relative paths are allowed")
    _require_tree([file.path for file in files])
    return files


def _require_tree(paths: list[str]) -> None:
    """Raise RecipeError where a name stands for two files, or for a file and a folder."""
    folders = {str(parent): path for path in paths for parent in PurePosixPath(path).parents}
    for path in paths:
        if path in folders:
            raise RecipeError(
                f"the recipe's code holds {path!r} as a file and {folders[path]!r} below it; rename one of them"
            )
        if paths.count(path) > 1:
            raise RecipeError(f"the recipe's code holds {path!r} twice; send each file once")


def install_code(bundle: run_pb2.CodeBundle, *, into: Path, allowed: bool) -> Path | None:
    """Write the bundle below `into` and return its folder; None when there is none or it may not be run.

    Code of a recipe of this release may always be run, any other when it is `allowed`. Idempotent: one folder per
    digest. Raises RecipeError when the bundle is not what its digest says.
    """
    if not bundle.files or not (allowed or bundle.sha256 in _shipped_code()):
        return None
    files = read_bundle(bundle, remedy="the server's data is damaged, create the run again")
    folder = into / bundle.sha256.hex()
    if not folder.is_dir():
        _write(files, folder=folder)
    return folder


@cache
def _shipped_code() -> frozenset[bytes]:
    """Digests of the code of this release's recipes."""
    bundles = [read_code(folder) for folder in shipped_recipes().values()]
    return frozenset(bundle_digest(files) for files in bundles if files)


def _write(files: list[CodeFile], *, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="incoming-", dir=folder.parent))
    try:
        for file in files:
            path = draft / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)

"""Recipe code reaches the disk only with leave, only as pinned, and only inside its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError
from astraflow.plugins import Reward
from astraflow.recipe.file import CodeFile, bundle_digest, load_recipe
from astraflow_kit.plugins import load
from astraflow_kit.recipe_code import install_code

CODE = "class Half: ..."


def bundle(files: Mapping[str, str]) -> run_pb2.CodeBundle:
    listed = [CodeFile(path, text.encode()) for path, text in sorted(files.items())]
    sent = [run_pb2.CodeFile(path=file.path, content=file.content) for file in listed]
    return run_pb2.CodeBundle(files=sent, sha256=bundle_digest(listed))


def test_allowed_code_is_written_once_under_its_digest(tmp_path: Path) -> None:
    code = bundle({"recipe.py": CODE, "parts/more.py": "X = 1"})
    folder = install_code(code, into=tmp_path, allowed=True)
    assert folder is not None
    assert folder.name == code.sha256.hex()
    assert (folder / "recipe.py").read_text() == CODE
    assert (folder / "parts" / "more.py").read_text() == "X = 1"
    stamp = (folder / "recipe.py").stat().st_mtime_ns
    assert install_code(code, into=tmp_path, allowed=True) == folder
    assert (folder / "recipe.py").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_without_leave_nothing_is_written(tmp_path: Path) -> None:
    assert install_code(bundle({"recipe.py": CODE}), into=tmp_path, allowed=False) is None
    assert list(tmp_path.iterdir()) == []


def test_code_that_differs_from_its_pin_is_refused(tmp_path: Path) -> None:
    code = bundle({"recipe.py": CODE})
    code.files[0].content += b"\nimport os"
    with pytest.raises(RecipeError, match="digest"):
        install_code(code, into=tmp_path, allowed=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["../evil.py", "/etc/evil.py", "a/../../evil.py", "data/", "a//b.py", ".hidden.py"]
)
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(RecipeError, match="relative paths"):
        install_code(bundle({path: "X = 1"}), into=tmp_path / "code", allowed=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        (["recipe.py", "recipe.py/x"], "'recipe.py' as a file and 'recipe.py/x' below it; rename one"),
        (["a/b", "a/b/c/d", "recipe.py"], "'a/b' as a file and 'a/b/c/d' below it"),
        (["recipe.py", "recipe.py"], "'recipe.py' twice"),
    ],
)
def test_paths_that_no_folder_can_have_are_refused(tmp_path: Path, paths: list[str], complaint: str) -> None:
    listed = [CodeFile(path, b"X = 1") for path in paths]
    sent = [run_pb2.CodeFile(path=file.path, content=file.content) for file in listed]
    code = run_pb2.CodeBundle(files=sent, sha256=bundle_digest(listed))
    with pytest.raises(RecipeError, match=complaint):
        install_code(code, into=tmp_path / "code", allowed=True)
    assert list(tmp_path.iterdir()) == []


def test_code_of_a_recipe_of_this_release_needs_no_leave(tmp_path: Path) -> None:
    shipped = load_recipe(Path("quickstart"))
    code = bundle({file.path: file.content.decode() for file in shipped.code})
    assert install_code(code, into=tmp_path, allowed=False) == tmp_path / shipped.code_sha256.hex()


def test_code_that_only_claims_the_digest_of_a_recipe_of_this_release_is_refused(tmp_path: Path) -> None:
    code = bundle({"recipe.py": CODE})
    code.sha256 = load_recipe(Path("quickstart")).code_sha256
    with pytest.raises(RecipeError, match="digest"):
        install_code(code, into=tmp_path, allowed=False)
    assert list(tmp_path.iterdir()) == []


def test_installed_code_imports_the_modules_beside_it_and_reads_its_data(tmp_path: Path) -> None:
    code = bundle(
        {
            "data/words.txt": "nine",
            "grading/words.py": "from pathlib import Path\nWORDS = Path(__file__).parents[1] / 'data' / 'words.txt'",
            "recipe.py": "from .grading.words import WORDS\n\ndef known(task, completion):\n"
            "    return float(completion in WORDS.read_text())\n",
        }
    )
    folder = install_code(code, into=tmp_path, allowed=True)
    reward = cast("Callable[[object, str], float]", load("recipe:known", protocol=Reward, recipe_dir=folder))
    assert (reward(None, "nine"), reward(None, "ten")) == (1.0, 0.0)

"""A new recipe folder from one that comes with this release: `astraflow recipe init`.

Invariant: the folder is whole or not there; it needs nothing of a checkout, and can be checked and trained as it is.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

from astraflow import __version__
from astraflow.errors import InvalidArgumentError
from astraflow.recipe import RunSettings, json_schema
from astraflow.recipe.shipped import shipped_recipes

__all__ = ["write_recipe"]

_SCHEMA = ".recipe.schema.json"
"""Hidden, so that it does not travel with the run."""
_NAME = re.compile(r"^(  name: )\S+", re.MULTILINE)
_SCHEMA_LINE = re.compile(r"^# yaml-language-server: .*$", re.MULTILINE)
_EXTENDED = re.compile(r"^extends: \.\./([a-z0-9-]+)/", re.MULTILINE)
"""A recipe that is another folder's with changes cannot be copied alone."""
_README = """# {name}

Made by `astraflow recipe init` from the recipe `{source}` of AstraFlow {version}. It runs as it is, without a GPU:

```sh
astraflow recipe check {name}     # runs the code once: one task, one grade, one prompt
astraflow dev {name} --dry-run    # says what would be started
astraflow dev {name}              # trains; --steps 5 for a first look
```

| file | |
|---|---|
| `recipe.yaml` | model, data set, reward, batches, optimizer; editors with a YAML language server complete its keys |
| `recipe.py` | the code that `recipe.yaml` names as `recipe:NAME`; files beside it travel with it, up to 1 MiB |

To make it yours:

1. **Tasks.** The class that `run.dataset` names returns training task `index` and held-out task `index`: messages, and
   data for the reward. Nothing that is held out may be in the training tasks.
2. **Reward.** What `raas.reward` names gets a task and what the model wrote, and returns a number.
3. **Model.** In place of `architecture`, `tokenizer` and `warm_start` give `path:` a folder or a name of the Hugging
   Face hub.
4. `astraflow recipe check {name}` after each change: mistakes are named with file and line.

One key for one run: `astraflow dev {name} --set trainer.optimizer.learning_rate=1e-4`.
"""


def write_recipe(folder: Path, *, source: str) -> list[Path]:
    """Make `folder`, new or empty, a recipe of that name like the shipped recipe `source`; returns its files.

    Raises InvalidArgumentError for names that cannot be used, and where the folder holds something or cannot be made.
    """
    name, shipped = folder.absolute().name, shipped_recipes()
    pattern = next(
        rule.pattern for rule in RunSettings.model_fields["name"].metadata if hasattr(rule, "pattern")
    )
    if not re.fullmatch(pattern, name):
        raise InvalidArgumentError(
            f"{name!r} cannot be the name of a run; use lower-case letters, digits and dashes, at most 64"
        )
    if source not in shipped:
        raise InvalidArgumentError(
            f"--from {source}: no recipe of this release; there are {', '.join(shipped)}"
        )
    base = _EXTENDED.search((shipped[source] / "recipe.yaml").read_text(encoding="utf-8"))
    if base is not None:
        raise InvalidArgumentError(
            f"--from {source}: that recipe is {base[1]} with a few keys changed; begin with --from {base[1]}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgumentError(f"{folder} is not empty; give a new name")
    try:
        _write(folder.absolute(), shipped[source], source=source)
    except OSError as error:
        raise InvalidArgumentError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}; give another folder"
        ) from error
    return sorted(folder.iterdir())


def _write(folder: Path, shipped: Path, *, source: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as parent:
        draft = Path(parent) / folder.name
        shutil.copytree(shipped, draft, ignore=shutil.ignore_patterns("README.md", "__pycache__"))
        text = (draft / "recipe.yaml").read_text(encoding="utf-8")
        text = _SCHEMA_LINE.sub(f"# yaml-language-server: $schema={_SCHEMA}", text, count=1)
        (draft / "recipe.yaml").write_text(_NAME.sub(rf"\g<1>{folder.name}", text, count=1), encoding="utf-8")
        (draft / _SCHEMA).write_text(json.dumps(json_schema()) + "\n", encoding="utf-8")
        readme = _README.format(name=folder.name, source=source, version=__version__)
        (draft / "README.md").write_text(readme, encoding="utf-8")
        draft.replace(folder)

"""Which weights a recipe's policies start from instead of their own: `astraflow eval --weights` as recipe overrides.

What is asked for is looked up before anything is started, so that a version, a store or a tokenizer that is not there
is said at once. Reads only.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import Recipe, StoredVersionSettings
from astraflow_kit.settings import load
from astraflow_launcher.run.folder import DEFAULT_ROOT
from astraflow_raas.policies.tokenizer import load_tokenizer
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import open_store
from astraflow_weights.versions.log import VersionLog

_OPTION = "--weights"
_STORE = re.compile(r"(file|s3)://\S+")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def weight_overrides(
    recipe: Recipe, weights: Sequence[str], *, run: str | None, version: int | None
) -> dict[str, str]:
    """Return the recipe keys that make the policies start from `weights`, with their values as YAML.

    Each is a model (a folder or a hub name), the folder or name of a run of `astraflow dev`, or the URI of a store in
    which `run` is; `POLICY=` before it means one policy. Raises InvalidArgumentError and NotFoundError for what is not
    there, and RecipeError for a model without a tokenizer.
    """
    if not weights and (run or version is not None):
        raise InvalidArgumentError(f"--run and --version say what to take of {_OPTION}; give that, too")
    found: dict[str, str] = {}
    for text in weights:
        policy, separator, source = text.partition("=")
        if not separator or policy not in recipe.policies:
            policy, source = "", text
        for name, model in _models(recipe, source, policy=policy, run=run, version=version).items():
            if found.setdefault(f"policies.{name}.model", model) != model:
                raise InvalidArgumentError(
                    f"{_OPTION} names the weights of policy {name!r} twice; give them once"
                )
    return found


def _models(
    recipe: Recipe, source: str, *, policy: str, run: str | None, version: int | None
) -> dict[str, str]:
    """`model` of each policy that `source` is about."""
    stored = _stored(source, run=run)
    if stored is not None:
        return _of_run(recipe, *stored, policy=policy, version=version)
    if version is not None or run is not None:
        raise InvalidArgumentError(
            f"{_OPTION} {source}: no run is there to take a version of; give the folder of a run of `astraflow dev`, "
            f"its name below {DEFAULT_ROOT / 'runs'}, or the URI of a store with --run"
        )
    own = [policy] if policy else _with_weights(recipe)
    if len(own) != 1:
        raise InvalidArgumentError(
            f"{_OPTION} {source}: the policies {', '.join(own)} have weights of their own; say whose these are: "
            f"{_OPTION} {own[0]}={source}"
        )
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        _require_tokenizer(folder)
        source = str(folder.absolute())
    elif folder.exists() or not _HUB_NAME.fullmatch(source):
        raise InvalidArgumentError(
            f"{_OPTION} {source}: neither a model (a folder with config.json, or a hub name like org/model) nor a run "
            "(a folder with run.json, or the URI of a store with --run)" + _of_no_policy(recipe, source)
        )
    else:
        _require_on_hub(source)
    return {own[0]: json.dumps({"path": source})}


def _of_no_policy(recipe: Recipe, source: str) -> str:
    name, separator, _ = source.partition("=")
    return f"; nor is {name!r} a policy: the recipe has {', '.join(recipe.policies)}" if separator else ""


def _require_on_hub(name: str) -> None:
    """Raise when the trainer could not get the model, before minutes are spent on starting one."""
    try:
        hf_hub_download(name, "config.json")
    except LocalEntryNotFoundError as error:
        raise InvalidArgumentError(
            f"{_OPTION} {name}: neither a folder nor downloaded before, and the hub cannot be reached: {error}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise InvalidArgumentError(
            f"{_OPTION} {name}: no folder, and the hub does not give it: {error}"
        ) from error


def _stored(source: str, *, run: str | None) -> tuple[str, str] | None:
    """Store and run id, where `source` is a store or a run's folder."""
    if _STORE.fullmatch(source):
        if run is None:
            raise InvalidArgumentError(f"{_OPTION} {source}: a store holds many runs; say which with --run")
        return source, run
    for folder in (Path(source).expanduser(), DEFAULT_ROOT / "runs" / source):
        if (folder / "run.json").is_file():
            record = json.loads((folder / "run.json").read_text())
            return (folder.absolute() / "store").as_uri(), run or str(record["run_id"])
    return None


def _of_run(recipe: Recipe, uri: str, run: str, *, policy: str, version: int | None) -> dict[str, str]:
    """The policies of the run have the names of the recipe's. `version` is that of trained ones, others have one."""
    if recipe.adapters:
        raise InvalidArgumentError(
            f"the recipe trains adapters ({', '.join(recipe.adapters)}), which cannot start from a version: export one "
            "with `astraflow weights export`, merge it into its model with peft, and name that folder"
        )
    names = [policy] if policy else [name for name in recipe.served_policies if name not in recipe.snapshots]
    starts = {
        name: _version_of(uri, run, name, version=version if recipe.policy(name).train else None)
        for name in names
    }
    return {
        name: json.dumps({"from_version": start.model_dump(exclude_none=True)})
        for name, start in starts.items()
    }


def _version_of(uri: str, run: str, policy_id: str, *, version: int | None) -> StoredVersionSettings:
    """The version, or the newest one. Raises InvalidArgumentError naming those there are, and as stores do."""
    log = VersionLog(open_store(uri, settings=load(StoreAccess).store), run_id=run, policy_id=policy_id)
    newest = log.refresh()
    if newest is None:
        raise InvalidArgumentError(
            f"{_OPTION}: {uri} has no version of policy {policy_id!r} of run {run!r}; look for the names with "
            "`astraflow weights list`"
        )
    number = newest if version is None else version
    if number > newest:
        raise InvalidArgumentError(
            f"--version {number}: policy {policy_id!r} of run {run!r} in {uri} has the versions 0 to {newest}"
        )
    record = log.record(number)
    return StoredVersionSettings(
        store=uri,
        run=run,
        policy=policy_id,
        version=number,
        step=record.step,
        manifest_sha256=record.manifest_sha256.hex(),
    )


def _with_weights(recipe: Recipe) -> list[str]:
    """The policies that start from weights of their own."""
    models = {name: policy.model for name, policy in recipe.policies.items()}
    return [
        name
        for name, model in models.items()
        if not (model.from_policy or model.lora or model.snapshot or model.external)
    ]


def _require_tokenizer(folder: Path) -> None:
    """Raise for a model whose tokenizer is not there, or makes tokens that the model has no embedding of."""
    fast = folder / "tokenizer.json"
    load_tokenizer(folder)
    rows = json.loads((folder / "config.json").read_text()).get("vocab_size")
    if not fast.is_file() or not isinstance(rows, int):
        return
    highest = max(Tokenizer.from_file(str(fast)).get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= rows:
        raise InvalidArgumentError(
            f"{_OPTION} {folder}: the tokenizer has tokens up to number {highest}, the model embeddings of {rows}: "
            "they do not belong together; put the model's own tokenizer there"
        )

"""`astraflow runs create` and `fork`: a run from a recipe, on a store that was proven first, or one that begins where
another stood after a step. The launcher makes its runs with `run_of`, too.

Invariant: a fork shares nothing with its source: it has a run id, an identity and logs of its own, and its trainers
copy the weights that they begin with. Until they have, those versions are pinned in the source's run, so that its
collection leaves them. What began where is part of the new run's recipe, as `model.from_version`.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from astraflow.client import Client
from astraflow.dataflow.v1 import (
    admin_service_pb2,
    run_pb2,
    run_service_pb2,
    version_pb2,
    version_service_pb2,
)
from astraflow.errors import AstraflowError, InvalidArgumentError, NotFoundError
from astraflow.recipe import Recipe, StoredVersionSettings
from astraflow.recipe.file import LoadedRecipe, parse_recipe

_TIMEOUT_S = 30.0
_PAGE = 1000

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URI", help="Weight store: s3://bucket/prefix or file:///folder.")
]


def run_of(loaded: LoadedRecipe, *, run_id: str, store_uri: str, recipe_yaml: str = "") -> run_pb2.Run:
    """Return the run of a recipe and its code. `recipe_yaml`: its text where that is not the resolved one."""
    files = [run_pb2.CodeFile(path=file.path, content=file.content) for file in loaded.code]
    return run_pb2.Run(
        run_id=run_id,
        recipe_yaml=recipe_yaml or loaded.yaml_text,
        recipe_as_written=loaded.written,
        code=run_pb2.CodeBundle(files=files, sha256=loaded.code_sha256),
        store_uri=store_uri,
    )


def create_run(client: Client, run: run_pb2.Run) -> run_pb2.Run:
    """Create the run, or return it as it is when an equal one exists. Raises ConflictError, RecipeError."""
    return client.call(
        client.runs.CreateRun, run_service_pb2.CreateRunRequest(run=run), timeout_s=_TIMEOUT_S
    ).run


def prepare_store(uri: str) -> str:
    """Make the store ready and return what was found. Raises what makes it unusable, with the remedy."""
    if uri.startswith("file:") and not Path(uri.removeprefix("file://")).is_absolute():
        raise InvalidArgumentError(f"--store {uri}: write file:///absolute/folder, with three slashes")
    preparation = _preparation("proving the store", otherwise="its first trainer proves it")
    found: str = preparation.prepare_store(uri)
    return found


def _preparation(what: str, *, otherwise: str) -> ModuleType:
    """What looks into stores. Raises InvalidArgumentError where that is not installed."""
    try:
        # Named, not imported: the public package needs no store, and where none is installed nobody can prove one.
        return importlib.import_module("astraflow_weights.tools.store_preparation")
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"{what} needs the package {error.name!r}; run: pip install 'astraflow[raas]', or give --no-probe: then "
            f"{otherwise}"
        ) from error


def fork_run(
    client: Client,
    source_id: str,
    *,
    run_id: str,
    step: int,
    overrides: Sequence[str] = (),
    store_uri: str = "",
    check_store: bool = True,
) -> run_pb2.Run:
    """Create run `run_id`, whose policies start with the weights that they had in the source after `step`.

    Policies that are not trained start with what they had there. The store is the source's unless another is named.
    Raises InvalidArgumentError, NotFoundError when a version cannot be had any more, ConflictError, RecipeError.
    """
    if run_id == source_id:
        raise InvalidArgumentError(f"a fork is a run of its own; give it another name than {run_id!r}")
    source = client.call(client.runs.GetRun, run_service_pb2.GetRunRequest(run_id=source_id)).run
    name = f"recipe of run {source_id}"
    starts = _starts(client, source, parse_recipe(source.recipe_yaml, source=name).recipe, step=step)
    models = [f"policies.{policy_id}.model={_model(start)}" for policy_id, start in starts.items()]
    changed = partial(parse_recipe, source=name, overrides=[*models, *overrides])
    forked = run_pb2.Run(
        run_id=run_id,
        recipe_yaml=changed(source.recipe_yaml).yaml_text,
        recipe_as_written=changed(source.recipe_as_written).written if source.recipe_as_written else "",
        code=source.code,
        store_uri=store_uri or source.store_uri,
    )
    with _pinned(client, source_id, starts, reason=f"run {run_id} starts from it"):
        if check_store:
            _require_stored(starts)
        return create_run(client, forked)


def origins_of(run: run_pb2.Run) -> dict[str, StoredVersionSettings]:
    """The version of another run that each policy of a run started with; empty for a run that is no fork."""
    policies = parse_recipe(run.recipe_yaml, source=f"recipe of run {run.run_id}").recipe.policies
    return {name: start for name, policy in policies.items() if (start := policy.model.from_version)}


def _starts(
    client: Client, source: run_pb2.Run, recipe: Recipe, *, step: int
) -> dict[str, StoredVersionSettings]:
    """The version that each policy with weights of its own had after `step`."""
    if recipe.adapters:
        raise InvalidArgumentError(
            f"run {source.run_id} trains adapters ({', '.join(recipe.adapters)}), and adapters start anew: export one "
            "with `astraflow weights export`, merge it into its model with peft, and name that folder in `model.path`"
        )
    request = admin_service_pb2.StatusRequest(run_id=source.run_id)
    status = client.call(client.admin.Status, request)
    finished = {policy.policy_id: policy.last_finished_step for policy in status.policies}
    starts = {}
    for name in recipe.served_policies:
        if name in recipe.snapshots:
            continue
        is_trained = recipe.policy(name).train
        if is_trained and step > finished.get(name, 0):
            raise InvalidArgumentError(
                f"--from-step {step}: policy {name!r} of run {source.run_id} has finished {finished.get(name, 0)} steps"
            )
        version = _version_after(client, source.run_id, name, step=step if is_trained else None)
        starts[name] = StoredVersionSettings(
            store=source.store_uri,
            run=source.run_id,
            policy=name,
            version=version.version,
            step=version.step,
            manifest_sha256=version.manifest_sha256.hex(),
        )
    return starts


def _version_after(client: Client, run_id: str, policy_id: str, *, step: int | None) -> version_pb2.Version:
    """The newest version that the policy had after `step`, or has now. A step that was skipped made none: then it is
    that of the step before; a rollback belongs to no step, and steps after it stand on it.
    """
    request = version_service_pb2.ListVersionsRequest(run_id=run_id, policy_id=policy_id, page_size=_PAGE)
    for page in client.pages(client.versions.ListVersions, request):
        for version in page.versions:
            is_later = step is not None and (
                version.step > step or (version.step == step and version.HasField("rollback_of"))
            )
            if not is_later:
                return version
    raise NotFoundError(
        f"policy {policy_id!r} of run {run_id} has published no version yet; try again when it has"
    )


@contextmanager
def _pinned(
    client: Client, run_id: str, starts: Mapping[str, StoredVersionSettings], *, reason: str
) -> Iterator[None]:
    """Pin the versions; what was not pinned before is let go again when the block fails."""
    made = []
    try:
        for name, start in starts.items():
            listed = version_service_pb2.ListVersionsRequest(run_id=run_id, policy_id=name, page_size=_PAGE)
            pages = client.pages(client.versions.ListVersions, listed)
            if any(pin.version == start.version for page in pages for pin in page.pins):
                continue
            request = version_service_pb2.PinVersionRequest(
                run_id=run_id, policy_id=name, version=start.version, reason=reason
            )
            client.call(client.versions.PinVersion, request)
            made.append(
                version_service_pb2.UnpinVersionRequest(run_id=run_id, policy_id=name, version=start.version)
            )
        yield
    except BaseException:
        for undo in made:
            with suppress(AstraflowError):  # a pin too many costs room; what failed is what matters
                client.call(client.versions.UnpinVersion, undo)
        raise


def _require_stored(starts: Mapping[str, StoredVersionSettings]) -> None:
    """Raise NotFoundError for a version whose parts were collected."""
    preparation = _preparation("looking into the store", otherwise="trainers find out")
    for start in starts.values():
        preparation.require_version(
            start.store, run_id=start.run, policy_id=start.policy, version=start.version
        )


def _model(start: StoredVersionSettings) -> str:
    """The `model` section of a policy that starts with a version; JSON is YAML."""
    return json.dumps({"from_version": start.model_dump(mode="json", exclude_none=True)})

"""Joining a run: the recipe, its code and the store come from the dataflow server, as they do for a node.

Invariant: recipe code from the server is written and imported only with leave (`--allow-recipe-code`), and
only when its digest matches. Called once, at start.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname

from astraflow.client import Client
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow.recipe import Recipe, ResolvedPolicy
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow.recipe.file import parse_recipe
from astraflow.recipe_changes import trainer_changes
from astraflow_kit.awaited_run import ONCE, AwaitedRun
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import drop_cut_line
from astraflow_kit.plugins import RecipeSource
from astraflow_kit.recipe_code import install_code

log = get_logger(__name__)

_ROLE = "trainer"


class JoinStopped(Exception):
    """A stop was asked for before there was a run to join."""


@dataclass(frozen=True)
class JoinedRun:
    """What a trainer knows of its run."""

    run_id: str
    recipe: Recipe
    policy_id: str
    store_uri: str
    source: RecipeSource
    """The recipe's text and own code, for its plug-ins."""
    changes: tuple[str, ...] = ()
    """Where `recipe` differs from the one that the run was created with: `key: old → new`."""

    @property
    def policy(self) -> ResolvedPolicy:
        """The settings of the policy this trainer trains."""
        return self.recipe.policy(self.policy_id)

    @property
    def logprob_archive(self) -> ArchiveSettings | None:
        """The archive, where it keeps what trainers made of tokens."""
        archive = self.recipe.dataflow.archive
        return archive if archive is not None and archive.trainer_logprobs else None

    def record_changes(self, folder: Path, *, first_step: int) -> None:
        """Add to the folder's history what of the run's recipe differs from `first_step` on, who wants it, and when.
        Nothing is added when it is what differed before.
        """
        path = folder / "recipe_changes.jsonl"
        drop_cut_line(path)
        lines = path.read_text().splitlines() if path.exists() else []
        if list(self.changes) == (json.loads(lines[-1])["changes"] if lines else []):
            return
        entry = {
            "time": datetime.now(tz=UTC).isoformat(),
            "user": f"{getuser()}@{gethostname()}",
            "first_step": first_step,
            "changes": self.changes,
        }
        with path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        log.warning("recipe.changed", first_step=first_step, changes=self.changes)


def find_run(
    client: Client, run_id: str, *, patience_s: float, stopped: Callable[[], bool] = lambda: False
) -> run_pb2.Run:
    """Ask the server for the run; waits up to `patience_s` for an unreachable server, and for a run that is not
    created yet.

    Raises UnavailableError when there was none, what says that the trainer was started wrongly, JoinStopped once
    `stopped()`.
    """
    awaited = AwaitedRun(client.address, run_id, event="trainer.waits", role=_ROLE, patience_s=patience_s)
    request, timeout_s = run_service_pb2.GetRunRequest(run_id=run_id), awaited.answer_timeout_s
    while True:
        try:
            client.server_info(timeout_s=timeout_s, retry=ONCE)
            return client.call(client.runs.GetRun, request, timeout_s=timeout_s, retry=ONCE).run
        except AstraflowError as error:
            wait_s = awaited.wait_s_after(error)
        if stopped():
            raise JoinStopped
        time.sleep(wait_s)


def join_run(
    run: run_pb2.Run,
    *,
    policy_id: str | None,
    work_dir: Path,
    allow_recipe_code: bool,
    recipe_file: Path | None = None,
    overrides: Sequence[str] = (),
) -> JoinedRun:
    """Read what the run says and choose the policy; the only policy when `policy_id` is None. With `recipe_file` what
    only the trainer reads is taken from there, with `key.path=value` overrides applied.

    Raises InvalidArgumentError for an unknown policy, or where the recipe's archive needs a package that is missing;
    PluginError when the recipe's code may not be used or is damaged, ConflictError when the file changes more,
    RecipeError when it holds no recipe.
    """
    source = RecipeSource(
        name=f"recipe of run {run.run_id}",
        text=run.recipe_yaml,
        folder=install_code(run.code, into=work_dir / "recipe", allowed=allow_recipe_code),
    )
    recipe, changes = parse_recipe(source.text, source=source.name).recipe, list[str]()
    if recipe_file is not None:
        source = replace(source, name=str(recipe_file), text=_text_of(recipe_file))
    if recipe_file is not None or overrides:
        changed = parse_recipe(source.text, source=source.name, overrides=overrides).recipe
        changes, recipe = trainer_changes(recipe, changed), changed
    joined = JoinedRun(
        run_id=run.run_id,
        recipe=recipe,
        policy_id=_choose(recipe, policy_id),
        store_uri=run.store_uri,
        source=source,
        changes=tuple(changes),
    )
    _require_archivable(joined)
    return joined


def _require_archivable(joined: JoinedRun) -> None:
    if joined.logprob_archive is not None and find_spec("pyarrow") is None:
        raise InvalidArgumentError(
            "the recipe asks for dataflow.archive.trainer_logprobs, and pyarrow is not installed here; run: "
            "pip install 'astraflow[archive]' (build the trainer's image with `--build-arg ARCHIVE=1`), or take it out "
            "of the recipe"
        )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--recipe {path} cannot be read: {error}; name a YAML file") from error


def _choose(recipe: Recipe, policy_id: str | None) -> str:
    known = list(recipe.policies)
    if policy_id is None and len(known) == 1:
        return known[0]
    if policy_id not in recipe.policies:
        raise InvalidArgumentError(
            f"policy {policy_id!r} is not in the recipe, which has {', '.join(known)}; name one with --policy"
        )
    if recipe.policy(policy_id).model.external is not None:
        raise InvalidArgumentError(
            f"policy {policy_id!r} is an external endpoint and has no trainer; start those of the other policies"
        )
    if policy_id in recipe.snapshots:
        raise InvalidArgumentError(
            f"policy {policy_id!r} is a snapshot of {recipe.snapshots[policy_id].of!r} and has no trainer; start those "
            "of the other policies"
        )
    return policy_id

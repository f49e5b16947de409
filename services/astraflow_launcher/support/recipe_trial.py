"""A recipe tried without a run: its plug-ins made as daemons make them, one task graded, its prompt tokenised.

Invariant: the code is tried as it travels, from a copy in a temporary folder; nothing is downloaded, and no engine is
needed. What cannot be tried here is said in a line, what is wrong is raised. Called by `astraflow recipe check`.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from astraflow.agents import AgentEndpoint
from astraflow.commands.run_creation import run_of
from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import (
    Dataset,
    Demonstrations,
    Message,
    MissingCapability,
    PolicyUnavailable,
    RewardFailed,
    TaskSpec,
)
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.runs.data_plugins import DataPlugins
from astraflow_dataflow.runs.drawing import draw
from astraflow_dataflow.runs.mixed_dataset import MixedDataset
from astraflow_dataflow.tasks.curation import new_task
from astraflow_kit.log import configure
from astraflow_kit.making import Making, MakingSettings
from astraflow_kit.plugins import RAISED, RecipeSource, describe, make
from astraflow_kit.recipe_code import install_code
from astraflow_kit.settings import load as load_settings
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.policies.tokenizer import load_tokenizer
from astraflow_raas.recipe_code import load_workflow
from astraflow_trainer.model.tokenizer import TokenizerSettings, render_chat, train_tokenizer
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.trackers.adapters import require_installed

_COMPLETION = "The answer is 42."
_STOP_S = 10.0


def try_recipe(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield a line for each thing that was tried.

    Raises PluginError and RecipeError for what a run would fail on.
    """
    # What fails is raised with its place; logs of parts of daemons would only hide it.
    configure("recipe", log_format="json", stream=StringIO())
    recipe = loaded.recipe
    text, source = loaded.own_text
    served = _Awaited()
    with TemporaryDirectory(prefix="astraflow-check-") as folder:
        run = run_of(loaded, run_id=recipe.run.name, store_uri="", recipe_yaml=text)
        load = partial(
            load_workflow,
            run,
            recipe,
            into=Path(folder) / "code",
            scratch=Path(folder),
            allowed=True,
            endpoint=cast(
                "AgentEndpoint", None
            ),  # kept by workflows for their episodes, of which there are none
            served=served,
        )
        limits = load_settings(MakingSettings).making
        workflow = Making(load, limits).made()
        code = Path(folder) / "code" / loaded.code_sha256.hex()
        own = RecipeSource(name=source, text=text, folder=code if code.is_dir() else None)
        plugins = Making(partial(DataPlugins.make, recipe, own), limits).made()
        for policy in recipe.resolved_policies.values():
            step = partial(StepPlugins.made, policy.trainer.algorithm, source=own, roles=policy.advantages)
            Making(step, limits).made()
            require_installed(policy.trainer.trackers)
        yield f"roles: {', '.join(workflow.roles)}"
        for name in served.names:
            yield f"environment {name}: served, not tried; nodes and `astraflow dev` need --environment {name}=…"
        for name in recipe.grading:
            of = f" of {name}" if name else ""
            dataset = (
                plugins.dataset.of(name) if isinstance(plugins.dataset, MixedDataset) else plugins.dataset
            )
            task = _first_task(dataset, recipe)
            yield f"data set{of}: task {task.task_id}"
            if (scorer := workflow.scorers.get(name)) is not None:
                yield f"reward{of}: {asyncio.run(_graded(scorer, task))}"
        asked = {role.policy_id for role in recipe.resolved_roles.values()}
        for policy_id in filter(asked.__contains__, recipe.served_policies):
            yield f"tokenizer of {policy_id}: {_prompt_of(policy_id, task, recipe=recipe, source=own)}"


class _Awaited(ServedEnvironments):
    """The served environments that a recipe names, which are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def require(self, name: str) -> None:
        """Remember it."""
        self.names.append(name)


def require_heldout(loaded: LoadedRecipe) -> None:
    """Raise RecipeError when the data set has no held-out task, PluginError when it fails on the first one."""
    with TemporaryDirectory(prefix="astraflow-check-") as folder:
        run = run_of(loaded, run_id=loaded.recipe.run.name, store_uri="", recipe_yaml=loaded.yaml_text)
        code = install_code(run.code, into=Path(folder), allowed=True)
        source = RecipeSource(name=str(loaded.file or "recipe"), text=loaded.yaml_text, folder=code)
        making = Making(
            partial(DataPlugins.make, loaded.recipe, source), load_settings(MakingSettings).making
        )
        dataset = making.made().dataset
        specs, _ = draw(dataset.heldout, start=0, count=1)
    if not specs:
        raise RecipeError(
            f"{loaded.recipe.run.data_name}: the data set has no held-out task, heldout(0) returns None; there is "
            "nothing to evaluate on"
        )


def _first_task(dataset: Dataset, recipe: Recipe) -> TaskSpec:
    """The first task for training, or held-out where there is none of those; both keep the contract's bounds."""
    found = []
    for method in (dataset.train, dataset.heldout):
        specs, _ = draw(method, start=0, count=1)
        for spec in specs:
            new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=recipe.dataflow.group_size)
        found += specs
    if not found:
        raise RecipeError(
            f"{recipe.run.data_name}: the data set has no task; train(0) and heldout(0) return None"
        )
    return found[0]


async def _graded(scorer: RewardScorer, task: TaskSpec) -> str:
    """Grade one completion that no model made."""
    try:
        score = await scorer(task, _COMPLETION)
    except (MissingCapability, PolicyUnavailable) as error:
        return f"not tried here: {error}"
    except RewardFailed as error:
        if scorer.wants_policies:
            return f"not tried here, as it asks a policy: {error}"
        raise PluginError(
            f"raas.reward fails for task {task.task_id} and the completion {_COMPLETION!r}: {error}; correct it, or "
            "check without running code: --no-code"
        ) from error
    finally:
        await scorer.stop(deadline_s=_STOP_S)
    return f"{score.reward:g} for task {task.task_id} and the completion {_COMPLETION!r}"


def _prompt_of(policy_id: str, task: TaskSpec, *, recipe: Recipe, source: RecipeSource) -> str:
    """Tokenise the task's messages as the policy will get them. Raises RecipeError when they do not fit."""
    settings = recipe.policy(policy_id)
    if (start := settings.model.from_version) is not None:
        return f"not tried, it comes with version {start.version} of run {start.run}"
    if settings.model.path is not None:
        folder = _local(settings.model.path)
        if folder is None:
            return f"not tried, {settings.model.path} is not on this machine"
        num_tokens = len(load_tokenizer(folder).encode(task.messages))
        config = (
            json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
        )
        most = config.get("max_position_embeddings")
    else:
        num_tokens = _tokens_of_own(recipe, settings.tokenizer_of, task, source=source)
        most = settings.model.architecture.max_position_embeddings if settings.model.architecture else None
    room = settings.sampling.max_new_tokens
    if isinstance(most, int) and num_tokens + room > most:
        raise RecipeError(
            f"policies.{policy_id}: the prompt of task {task.task_id} has {num_tokens} tokens, and with "
            f"sampling.max_new_tokens {room} that is more than the {most} positions of the model; shorten either"
        )
    return f"{num_tokens} tokens of prompt, and {room} to sample"


def _local(path: str) -> Path | None:
    """The folder of a model that is on this machine; nothing is downloaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None


def _tokens_of_own(recipe: Recipe, policy_id: str, task: TaskSpec, *, source: RecipeSource) -> int:
    """Train the tokenizer as the trainer will, from the recipe's demonstrations, and count the prompt's tokens."""
    model = recipe.policy(policy_id).model
    assert model.tokenizer is not None and model.warm_start is not None  # noqa: PT018 - the recipe's own rule
    plugin = model.warm_start.demonstrations
    making = partial(make, plugin, protocol=Demonstrations, source=source)
    demonstrations = Making(making, load_settings(MakingSettings).making).made()
    try:
        shown = list(islice(demonstrations(recipe.run.seed), model.tokenizer.num_texts))
        texts = [_chat(item.messages) + item.completion for item in shown]
    except RAISED as error:
        raise PluginError(
            f"{plugin.use} raised: {describe(error)}; the warm start needs its demonstrations"
        ) from error
    trained = train_tokenizer(texts, settings=TokenizerSettings(vocab_size=model.tokenizer.vocab_size))
    return len(trained(_chat(task.messages))["input_ids"])


def _chat(messages: Sequence[Message]) -> str:
    return render_chat([message.as_chat() for message in messages])

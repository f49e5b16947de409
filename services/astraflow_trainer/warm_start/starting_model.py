"""The weights a policy starts from: a model to load, a version of another run, or one built and warm-started.

Translates the recipe's `model` section to the compute core; the result is always a Hugging Face directory,
whose files besides the weights become the assets of every version. Called once, when a trainer starts.
"""

import hashlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import islice
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from astraflow.errors import NotFoundError, RecipeError, UnavailableError
from astraflow.plugins import Demonstrations
from astraflow.recipe import ArchitectureSettings, ModelSettings, StoredVersionSettings
from astraflow.recipe.model import ReferenceModel
from astraflow_kit.plugins import make
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.model.model import ModelShape
from astraflow_trainer.model.tokenizer import TokenizerSettings, render_chat
from astraflow_trainer.warm_start.cache import InitialModel, digest_of, prepare_initial_model
from astraflow_trainer.warm_start.training import Example
from astraflow_trainer.warm_start.training import WarmStartSettings as SupervisedSettings
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import open_store
from astraflow_weights.tools.export import export_version
from astraflow_weights.versions.log import VersionLog

# Everything a node needs beside the weights: configuration, tokenizer, chat template.
_ASSET_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
_NOT_ASSETS = frozenset({"model.safetensors.index.json", "warm_start.json"})


def starting_model(
    joined: JoinedRun,
    *,
    cache: Path,
    threads: int,
    progress: Callable[[float], None],
    access: StoreSettings | None = None,
) -> Path:
    """Return the directory of the initial model, making it when the cache does not hold it.

    `progress` is called with the finished share of a warm start, `access` says how to reach another run's store. Raises
    PluginError and RecipeError for what the recipe says, NotFoundError and UnavailableError for what the hub says,
    OSError when a model cannot be loaded, and as stores do.
    """
    settings = joined.policy.model
    if settings.from_version is not None:
        return _of_other_run(settings.from_version, cache=cache, access=access)
    if settings.path is not None:
        return _at_path(settings.path)
    return _warm_started(joined, settings, cache=cache, threads=threads, progress=progress)


def reference_model(
    reference: ReferenceModel,
    *,
    log: VersionLog,
    folder: Path,
    cache: Path,
    access: StoreSettings | None = None,
) -> Path:
    """Return the directory of a model that a KL term compares with and that is there already; a version of the policy's
    own, whose `log` this is, is kept in `folder`. Raises NotFoundError, and as `starting_model` does.
    """
    if reference.from_version is not None:
        return _of_other_run(reference.from_version, cache=cache, access=access)
    if reference.path is not None:
        return _at_path(reference.path)
    assert reference.version is not None, "one key is given"
    kept = folder / f"version-{reference.version}"
    if not kept.is_dir():
        log.refresh_entries()
        if reference.version >= len(log.records):
            raise NotFoundError(
                f"the KL term compares with version {reference.version} of its policy, and the store has "
                f"{len(log.records)} of them; name one that is there, or use `model`, the initial one"
            )
        export_version(log.store, log, version=reference.version, to=kept)
    return kept


def built_reference(
    reference: ReferenceModel,
    joined: JoinedRun,
    *,
    cache: Path,
    threads: int,
    progress: Callable[[float], None],
) -> Path:
    """Return the directory of a teacher with the tokenizer of the policy that it teaches, making it when the cache does
    not hold it. Raises as `starting_model` does.
    """
    own = joined.policy.model
    built = {"warm_start": reference.warm_start, "architecture": reference.architecture or own.architecture}
    return _warm_started(
        joined, own.model_copy(update=built), cache=cache, threads=threads, progress=progress
    )


def _at_path(path: str) -> Path:
    local = Path(path).expanduser()
    return local if local.is_dir() else _from_the_hub(path)


def _from_the_hub(name: str) -> Path:
    wanted = f"the recipe's model {name} is no folder on this machine"
    try:
        return Path(snapshot_download(name))
    except LocalEntryNotFoundError as error:
        raise UnavailableError(
            f"{wanted}, and the hub cannot be reached for it: {error}; look at the name and the network, or download it"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        kind = (
            UnavailableError
            if status == HTTPStatus.TOO_MANY_REQUESTS or (status or 0) >= 500
            else NotFoundError
        )
        raise kind(
            f"{wanted}, and the hub does not give it: {error}; look at the name, or set HF_TOKEN"
        ) from error


def asset_files(directory: Path) -> list[Path]:
    """Return the files of a model directory that travel with every version, sorted by name."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix in _ASSET_SUFFIXES and path.name not in _NOT_ASSETS
    )


def _of_other_run(start: StoredVersionSettings, *, cache: Path, access: StoreSettings | None) -> Path:
    """The version in a folder of the cache, verified when it was fetched. Raises NotFoundError, CorruptManifest."""
    name = hashlib.sha256(start.model_dump_json().encode()).hexdigest()[:16]
    folder = cache / "versions" / f"{start.run}-{start.policy}-{start.version}-{name}"
    if folder.is_dir():
        return folder
    store = open_store(start.store, settings=access)
    log = VersionLog(store, run_id=start.run, policy_id=start.policy)
    log.refresh()
    if start.version >= len(log.records):
        raise NotFoundError(
            f"{start.store} has no version {start.version} of policy {start.policy!r} of run {start.run!r}, which the "
            "recipe starts from: it is another store, or was emptied; restore it, or create the run anew"
        )
    found = log.record(start.version).manifest_sha256.hex()
    if start.manifest_sha256 not in (None, found):
        raise CorruptManifest(
            f"version {start.version} of policy {start.policy!r} of run {start.run!r} in {start.store} has manifest "
            f"{found[:16]}…, the recipe wants {start.manifest_sha256[:16]}…: the store was begun anew; restore it, or "
            "fork again"
        )
    export_version(store, log, version=start.version, to=folder)
    return folder


def _warm_started(
    joined: JoinedRun,
    settings: ModelSettings,
    *,
    cache: Path,
    threads: int,
    progress: Callable[[float], None],
) -> Path:
    tokenizer_settings = joined.recipe.policy(joined.policy.tokenizer_of).model
    architecture, warm_start, tokenizer = (
        settings.architecture,
        settings.warm_start,
        tokenizer_settings.tokenizer,
    )
    # The recipe's own validation allows no `architecture` without the other two.
    assert architecture is not None
    assert tokenizer is not None
    assert warm_start is not None
    supervised = SupervisedSettings(
        steps=warm_start.steps, batch_size=warm_start.batch_size, learning_rate=warm_start.learning_rate
    )
    texts = _Examples(joined, tokenizer_settings, tokenizer.num_texts)
    examples = _Examples(joined, settings, supervised.num_examples)
    initial = InitialModel(
        shape=_shape(architecture),
        tokenizer=TokenizerSettings(vocab_size=tokenizer.vocab_size),
        warm_start=supervised,
        seed=joined.recipe.run.seed,
        digests=(digest_of(texts), digest_of(examples)),
    )
    return prepare_initial_model(
        cache,
        initial=initial,
        tokenizer_examples=texts,
        examples=examples,
        num_threads=threads,
        progress=lambda step, loss: progress(step / warm_start.steps),
    )


class _Examples:
    """The first demonstrations of a model's warm start as examples; each iteration starts the stream anew."""

    def __init__(self, joined: JoinedRun, settings: ModelSettings, num_needed: int) -> None:
        # The recipe's own validation allows no `tokenizer`, and no `architecture`, without it.
        assert settings.warm_start is not None
        self._plugin = settings.warm_start.demonstrations
        self._demonstrations = make(self._plugin, protocol=Demonstrations, source=joined.source)
        self._seed, self._num_needed = joined.recipe.run.seed, num_needed

    def __iter__(self) -> Iterator[Example]:
        count = 0
        for demonstration in islice(self._demonstrations(self._seed), self._num_needed):
            count += 1
            prompt = render_chat([message.as_chat() for message in demonstration.messages])
            yield Example(prompt=prompt, completion=demonstration.completion)
        if count < self._num_needed:
            raise RecipeError(
                f"{self._plugin.use} ended after {count} demonstrations, the warm start needs {self._num_needed}; "
                "make the stream endless, or lower warm_start.steps or tokenizer.num_texts"
            )


def _shape(architecture: ArchitectureSettings) -> ModelShape:
    # The tokenizer decides the vocabulary; InitialModel replaces this.
    return ModelShape(vocab_size=1, **architecture.model_dump())

"""Where the first weights come from: a folder, or a warm start that is made once from the recipe's plug-in."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoTokenizer

from astraflow.errors import AstraflowError, NotFoundError, PluginError, RecipeError, UnavailableError
from astraflow.recipe.file import parse_recipe
from astraflow.recipe.model import ReferenceModel
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.model.model import load_causal_lm
from astraflow_trainer.warm_start import starting_model as module
from astraflow_trainer.warm_start.starting_model import asset_files, built_reference, starting_model
from support.scripted_dataflow import RECIPE

BUILT = """
      architecture: {hidden_size: 16, num_hidden_layers: 1, head_dim: 8, intermediate_size: 32,
                     num_attention_heads: 2, num_key_value_heads: 1}
      tokenizer: {vocab_size: 280, num_texts: 10}
      warm_start: {demonstrations: "recipe:PLUGIN", steps: 2, batch_size: 4}
"""
PLUGINS = """
from itertools import count, islice
from pathlib import Path
from astraflow.plugins import Demonstration, Message

def endless(seed: int):
    with Path(__file__).with_name("calls.txt").open("a") as calls:
        calls.write(f"{seed}\\n")
    for number in count(1):
        question = Message(role="user", content=f"Say {number}.")
        yield Demonstration(messages=(question,), completion=f"{number} of {seed}")

def others(seed: int):
    return (Demonstration(shown.messages, shown.completion[::-1]) for shown in endless(seed))

def ends_after_five(seed: int):
    return islice(endless(seed), 5)

def wants_no_seed():
    return iter(())
"""


@dataclass
class Bench:
    """Where models are made from a folder of recipe code, or a recipe of a model folder."""

    code: Path | None
    cache: Path
    shares: list[float] = field(default_factory=list)
    """The progress that was told."""

    def start(self, *, plugin: str = "recipe:endless", seed: int = 5) -> Path:
        return self.start_from(BUILT.replace("recipe:PLUGIN", plugin), seed=seed)

    def start_from(self, model: str, *, seed: int = 5, second: str = "", policy: str = "solver") -> Path:
        other = f"\n  second:\n    model: {second}\n" if second else ""
        joined = self.joined(model.rstrip() + other, f"run.seed={seed}", policy=policy)
        return starting_model(joined, cache=self.cache, threads=1, progress=self.shares.append)

    def joined(self, model: str, *overrides: str, policy: str = "solver") -> JoinedRun:
        text = RECIPE.replace(" {path: somewhere}", model)
        recipe = parse_recipe(text, overrides=overrides).recipe
        source = RecipeSource(text=text, folder=self.code)
        return JoinedRun("run-1", recipe, policy, "file:///nowhere", source)

    def write(self, code: str) -> None:
        """Replace the recipe's code."""
        assert self.code is not None
        (self.code / "recipe.py").write_text(code)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """With recipe code, of which no module is left imported afterwards."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "recipe.py").write_text(PLUGINS)
    before, path = set(sys.modules), list(sys.path)
    yield Bench(code, tmp_path / "cache")
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "recipe" in name.split("."):
            del sys.modules[name]


def test_a_model_folder_is_used_as_it_is(bench: Bench, tmp_path: Path) -> None:
    assert bench.start_from(f" {{path: {tmp_path}}}") == tmp_path
    assert not bench.cache.exists()


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (None, UnavailableError, "org/model is no folder .* the hub cannot be reached"),
        (404, NotFoundError, "the hub does not give it: .* look at the name, or set HF_TOKEN"),
        (401, NotFoundError, "the hub does not give it"),
        (503, UnavailableError, "the hub does not give it"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named_and_only_an_outage_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer: int | None, kind: type[AstraflowError], said: str
) -> None:
    def refuse(name: str) -> str:
        if answer is None:
            raise LocalEntryNotFoundError("no connection")
        request = httpx.Request("GET", f"https://hub/{name}")
        raise HfHubHTTPError("no", response=httpx.Response(answer, request=request))

    monkeypatch.setattr(module, "snapshot_download", refuse)
    with pytest.raises(kind, match=said):
        bench.start_from(" {path: org/model}")


def test_assets_are_all_files_a_node_needs_besides_weights(tmp_path: Path) -> None:
    wanted = ["chat_template.jinja", "config.json", "merges.txt", "spiece.model", "tokenizer.json"]
    others = ["model.safetensors", "model.safetensors.index.json", "warm_start.json", "pytorch_model.bin"]
    for name in wanted + others:
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    assert [path.name for path in asset_files(tmp_path)] == wanted


def test_a_warm_start_makes_a_model_with_its_tokenizer_and_tells_how_far_it_is(bench: Bench) -> None:
    directory = bench.start()
    assert bench.shares == [0.5, 1.0]
    config, tokenizer = load_causal_lm(directory).config, AutoTokenizer.from_pretrained(directory)
    assert (config.hidden_size, config.vocab_size) == (16, len(tokenizer))
    assert (config.eos_token_id, config.pad_token_id) == (2, 0)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in asset_files(directory)}
    assert list(bench.cache.iterdir()) == [directory]
    assert bench.code is not None
    assert set((bench.code / "calls.txt").read_text().split()) == {"5"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_warm_start_makes_a_model_of_the_family_that_the_recipe_names(
    bench: Bench, model_type: str
) -> None:
    named = BUILT.replace("recipe:PLUGIN", "recipe:endless").replace(
        "{hidden_size", f"{{model_type: {model_type}, hidden_size"
    )
    config = load_causal_lm(bench.start_from(named)).config
    assert (config.model_type, config.head_dim) == (model_type, 8)


def test_a_cached_warm_start_is_used_again_whatever_else_the_code_says(bench: Bench) -> None:
    first = bench.start()
    bench.shares.clear()
    bench.write(PLUGINS + "\nclass Reward: ...\n")
    assert bench.start() == first
    assert bench.shares == []


def test_other_demonstrations_or_another_seed_make_another_model(bench: Bench) -> None:
    first = bench.start()
    assert bench.start(seed=6) != first
    bench.write(PLUGINS.replace("Say {number}.", "Tell {number}."))
    assert bench.start() != first


def test_a_policy_may_start_from_another_or_with_its_tokenizer(bench: Bench) -> None:
    built = BUILT.replace("recipe:PLUGIN", "recipe:endless")
    first = bench.start_from(built)
    assert bench.start_from(built, second="{from_policy: solver}", policy="second") == first
    own = built.replace("{vocab_size: 280, num_texts: 10}", "{from_policy: solver}").replace(
        "endless", "others"
    )
    second = bench.start_from(built, second=own, policy="second")
    assert second != first
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_a_teacher_is_built_with_the_tokenizer_of_its_student_on_demonstrations_of_its_own(
    bench: Bench,
) -> None:
    built = BUILT.replace("recipe:PLUGIN", "recipe:endless").rstrip()
    warm_start = "warm_start: {demonstrations: 'recipe:others', steps: 3, batch_size: 4}"
    wider = (
        BUILT.split("architecture: ")[1].split("tokenizer")[0].replace("hidden_size: 16", "hidden_size: 24")
    )
    teachers = []
    for own in ("", f", architecture: {wider}"):
        kl = f"trainer.algorithm={{preset: opd, kl: {{reference: {{{warm_start}{own}}}}}}}"
        joined = bench.joined(built, kl)
        settings = joined.policy.trainer.algorithm.kl
        assert settings is not None
        assert isinstance(settings.reference, ReferenceModel)
        teachers.append(
            built_reference(
                settings.reference, joined, cache=bench.cache, threads=1, progress=bench.shares.append
            )
        )
    assert bench.shares == [1 / 3, 2 / 3, 1.0] * 2
    student = bench.start_from(built)
    assert len({student, *teachers}) == 3
    tokenizers = {(folder / "tokenizer.json").read_bytes() for folder in (student, *teachers)}
    assert len(tokenizers) == 1
    assert [load_causal_lm(folder).config.hidden_size for folder in teachers] == [16, 24]


def test_demonstrations_that_end_early_are_named_with_what_was_needed(bench: Bench) -> None:
    with pytest.raises(RecipeError, match=r"ends_after_five ended after 5 demonstrations, .* needs 10"):
        bench.start(plugin="recipe:ends_after_five")
    assert not bench.cache.exists()


UNUSABLE = [
    ("recipe:Missing", "has no 'Missing'"),
    ("recipe:wants_no_seed", "is not a Demonstrations"),
    ("no_such_package:Endless", "no_such_package"),
]


@pytest.mark.parametrize(("plugin", "complaint"), UNUSABLE)
def test_an_unusable_plug_in_is_refused_at_once(plugin: str, complaint: str, bench: Bench) -> None:
    with pytest.raises(PluginError, match=complaint):
        bench.start(plugin=plugin)
    assert not bench.cache.exists()


def test_recipe_code_that_may_not_run_here_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="--allow-recipe-code"):
        Bench(code=None, cache=tmp_path / "cache").start()

"""Wrong recipes are refused with line, nearest key and arithmetic; good ones survive a round trip."""

import re
from math import inf
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from astraflow.errors import RecipeError
from astraflow.recipe import BatchSettings, Recipe
from astraflow.recipe.algorithm import Gspo, KlSettings, M2po
from astraflow.recipe.file import CodeFile, bundle_digest, load_recipe, parse_recipe, place_of
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.rollout.v1 import task_pb2

GOOD = """\
run:
  name: tiny
  dataset: recipe:Data
policies:
  solver:
    model:
      architecture:
        hidden_size: 64
        num_hidden_layers: 1
        num_attention_heads: 4
        num_key_value_heads: 2
        head_dim: 16
        intermediate_size: 128
      tokenizer: {vocab_size: 300}
      warm_start: {demonstrations: "recipe:demos", steps: 5}
raas:
  reward: recipe:Reward
"""


WITH = {"a": None, "b": inf, "c": [1, "x"]}
FILTER = {"use": "recipe:F", "with": {"low": {"x": 1}}}


def assert_refused(text: str, line: int, words: str) -> None:
    """The recipe is refused with these words at this line."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, source="recipe.yaml")
    assert words in caught.value.message
    assert f"recipe.yaml:{line}:" in caught.value.message


def test_a_good_recipe_is_reproduced_by_its_own_text() -> None:
    loaded = parse_recipe(GOOD)
    assert parse_recipe(loaded.yaml_text).recipe == loaded.recipe
    assert loaded.recipe.dataflow.group_size == 8


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("recipe:R", "recipe:R"),
        ("{use: recipe:R}", "recipe:R"),
        ("{use: recipe:R, with: {a: null, b: .inf, c: [1, x]}}", {"use": "recipe:R", "with": WITH}),
    ],
)
def test_a_plug_in_is_kept_in_its_shortest_form_with_all_its_settings(written: str, kept: object) -> None:
    loaded = parse_recipe(GOOD.replace("recipe:Reward", written))
    assert YAML(typ="safe").load(loaded.yaml_text)["raas"]["reward"] == kept
    assert parse_recipe(loaded.yaml_text).recipe == loaded.recipe


@pytest.mark.parametrize(
    ("plugin", "keys", "place"),
    [
        ("recipe:Data", (), "r.yaml:3: run.dataset"),
        (FILTER, (), "r.yaml:21: dataflow.filters.1"),
        (FILTER, ("low", "x"), "r.yaml:23: dataflow.filters.1.with.low.x"),
        ("recipe:Elsewhere", ("x",), "r.yaml"),
    ],
)
def test_the_place_of_a_plug_in_is_found(plugin: object, keys: tuple[str, ...], place: str) -> None:
    filters = "dataflow:\n  filters:\n  - use: recipe:F\n    with:\n      low: {x: 1}\n"
    text = GOOD + filters.replace("  - use", "  - recipe:F\n  - use")
    assert place_of(PluginSettings.model_validate(plugin), text, source="r.yaml", keys=keys) == place


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("name: tiny", "nmae: tiny", 2, "did you mean `name`"),
        ("name: tiny", "name: Tiny Run", 2, "pattern"),
        ("hidden_size: 64", "hidden_size: wide", 8, "got 'wide'"),
        ("hidden_size: 64", "hiden_size: 64", 8, "did you mean `hidden_size`"),
        ("num_key_value_heads: 2", "num_key_value_heads: 3", 7, "remainder 1"),
        ("head_dim: 16", "head_dim: 15", 7, "odd"),
        ("  dataset: recipe:Data\n", "", 1, "give either `dataset`, or `sources`"),
        (
            "  dataset: recipe:Data",
            "  dataset: recipe:D\n  sources: {a: {dataset: recipe:D}}",
            1,
            "give either",
        ),
        (
            "  dataset: recipe:Data",
            "  sources: {a: {dataset: recipe:D, weight: 0}}",
            3,
            "greater than or equal to 1",
        ),
        ("  dataset: recipe:Data", "  sources: {a:b: {dataset: recipe:D}}", 3, "pattern"),
        ("head_dim: 16", "head_dim: 16\n        model_type: gemma3_text", 13, "'llama', 'qwen2' or 'qwen3'"),
        ("hidden_size: 64", "hidden_size: 66\n        model_type: llama", 7, "remainder 2"),
        ("recipe:Reward", "Reward", 17, "pattern"),
        ("recipe:Reward", "7", 17, "write `module.path:Name`, or `{use: module.path:Name, with: {...}}`"),
        ("recipe:Reward", "{use: recipe:R, wiht: {x: 1}}", 17, "did you mean `with`"),
        ("raas:", "dataflow: {filters: [{us: recipe:F}]}\nraas:", 16, "did you mean `use`"),
        ("raas:", "rass:", 16, "did you mean `raas`"),
        ("steps: 5", "steps: 0", 15, "greater than or equal to 1"),
        ("      tokenizer: {vocab_size: 300}\n", "", 6, "also needs `tokenizer`"),
        ("      architecture:", "      path: some/model\n      architecture:", 6, "exactly one of"),
    ],
)
def test_a_wrong_recipe_names_line_and_remedy(old: str, new: str, line: int, words: str) -> None:
    assert old in GOOD
    assert_refused(GOOD.replace(old, new, 1), line, words)


@pytest.mark.parametrize(
    ("where", "line", "words"),
    [
        ("trainer: {algorithm: {clip_high: 0.2}}", 20, "for example `loss: {kind: ppo_clip, high: 0.28}`"),
        ("trainer: {algorithm: {m2_budget: 0.2}}", 20, "for example `loss: {kind: m2po, budget: 0.04}`"),
        ("trainer:\n  algorithm:\n    loss: {kind: gspo, lwo: 1}", 22, "did you mean `low`"),
        ("trainer:\n  algorithm:\n    loss: {kind: gspo, low: 7}", 22, "trainer.algorithm.loss.low: "),
        ("trainer:\n  algorithm:\n    loss: gpso", 22, "unknown kind 'gpso'; did you mean `gspo`"),
        ("trainer:\n  algorithm:\n    aggregation: constant", 22, "aggregation.length: this key is required"),
        ("trainer: {algorithm: {anchor: proximal}}", 5, "policies.solver: m2po bounds the distance"),
    ],
)
def test_a_wrong_algorithm_names_line_and_remedy(where: str, line: int, words: str) -> None:
    assert_refused(GOOD + "# the algorithm\n# follows\n" + where, line, words)


def _second_policy(*settings: str) -> str:
    """The recipe with a policy `critic` of its own settings in front of `solver`."""
    own = "".join(f"    {line}\n" for line in settings)
    return GOOD.replace("policies:\n", f"policies:\n  critic:\n    model: {{path: some/model}}\n{own}")


def test_a_policy_without_settings_of_its_own_has_those_of_the_run() -> None:
    recipe = parse_recipe(GOOD, overrides=["run.steps=9", "dataflow.max_staleness=3"]).recipe
    solver = recipe.policy("solver")
    assert (solver.steps, solver.trainer) == (9, recipe.trainer)
    assert (solver.batches.groups_per_step, solver.batches.max_staleness) == (16, 3)


def test_a_run_of_no_steps_trains_no_policy_whatever_it_says() -> None:
    recipe = parse_recipe(_second_policy("steps: 5"), overrides=["run.steps=0"]).recipe
    assert [policy.steps for policy in recipe.resolved_policies.values()] == [0, 0]


def test_an_evaluation_has_a_million_samples_at_most() -> None:
    overrides = ["dataflow.evaluation={num_samples: 1, final_samples: 1000, samples_per_task: 1001}"]
    with pytest.raises(RecipeError, match=r"1,001,000 samples .* is larger than 1,000,000"):
        parse_recipe(GOOD, overrides=overrides)


def test_a_policy_overrides_single_keys_at_any_depth_and_a_loss_as_a_whole() -> None:
    text = _second_policy(
        "steps: 5",
        "dataflow: {groups_per_step: 4}",
        "trainer: {optimizer: {learning_rate: 0.5}, algorithm: {loss: gspo, kl: null}}",
    )
    common = [
        "trainer.optimizer.beta1=0.5",
        "trainer.algorithm={loss: {kind: m2po, budget: 0.01}, kl: {coefficient: 0.1}}",
    ]
    loaded = parse_recipe(text, overrides=["dataflow.max_staleness=7", *common])
    for recipe in (loaded.recipe, parse_recipe(loaded.yaml_text).recipe):
        critic, solver = recipe.policy("critic"), recipe.policy("solver")
        assert (critic.steps, solver.steps) == (5, 100)
        assert critic.batches == BatchSettings(groups_per_step=4, max_staleness=7)
        assert solver.batches == BatchSettings(groups_per_step=16, max_staleness=7)
        assert (critic.trainer.optimizer.learning_rate, critic.trainer.optimizer.beta1) == (0.5, 0.5)
        assert critic.trainer.algorithm.loss == Gspo()
        assert critic.trainer.algorithm.kl is None
        assert solver.trainer.algorithm.loss == M2po(budget=0.01)
        assert solver.trainer.algorithm.kl == KlSettings(coefficient=0.1)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("dataflow: {max_stalenes: 1}", "dataflow.max_stalenes: unknown key; did you mean `max_staleness`"),
        ("dataflow: {group_size: 4}", "it holds for all policies; set it in `dataflow`"),
        (
            "trainer: {optimizer: {lr: 1}}",
            "trainer.optimizer.lr: unknown key; known keys: kind, learning_rate",
        ),
        ("stpes: 4", "critic.stpes: unknown key; did you mean `steps`"),
        ("steps: 0", "critic.steps: Input should be greater than or equal to 1"),
    ],
)
def test_what_a_policy_cannot_override_is_refused_with_its_line(own: str, words: str) -> None:
    assert_refused(_second_policy(own), 7, words)


def test_settings_of_a_policy_that_do_not_go_together_with_the_runs_are_refused() -> None:
    text = _second_policy("trainer: {algorithm: {loss: m2po}}")
    overrides = ["trainer.algorithm={loss: gspo, anchor: proximal}"]
    with pytest.raises(RecipeError, match=r"policies\.critic: m2po bounds the distance"):
        parse_recipe(text, overrides=overrides)
    assert parse_recipe(GOOD, overrides=overrides).recipe.policy("solver").trainer.algorithm.loss == Gspo()


def test_every_problem_is_reported_at_once() -> None:
    text = GOOD.replace("name: tiny", "nmae: tiny").replace("recipe:Reward", "Reward")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    assert len(caught.value.message.splitlines()) == 3  # unknown key, missing key, bad plug-in name


def test_impossible_combinations_show_their_arithmetic() -> None:
    with pytest.raises(RecipeError, match="min_members 9 exceeds group_size 8"):
        parse_recipe(GOOD, overrides=["dataflow.min_members=9"])
    with pytest.raises(RecipeError, match="max_new_tokens 512 leaves no room"):
        parse_recipe(GOOD, overrides=["policies.solver.sampling.max_new_tokens=512"])
    with pytest.raises(RecipeError, match="64 and a prompt of at least 1 token are more than"):
        parse_recipe(
            GOOD,
            overrides=["policies.solver.sampling.max_new_tokens=64", "trainer.tokens_per_microbatch=64"],
        )


def test_experts_are_recorded_of_mixtures_that_are_trained() -> None:
    replay, given = "trainer.router_replay=true", "policies.solver.model={path: mixture}"
    with pytest.raises(RecipeError, match=r"policies\.solver: router_replay is of a mixture of experts"):
        parse_recipe(GOOD, overrides=[replay])
    assert parse_recipe(GOOD, overrides=[replay, given]).recipe.recorded_policies == {"solver"}
    assert parse_recipe(GOOD, overrides=[given]).recipe.recorded_policies == frozenset()


def test_sampling_is_sent_as_it_is_in_the_recipe() -> None:
    policy = parse_recipe(GOOD, overrides=["policies.solver.sampling.temperature=0.5"]).recipe.policy(
        "solver"
    )
    sent = task_pb2.SamplingParams(**policy.sampling.parameters())
    assert (sent.temperature, sent.top_p, sent.max_new_tokens) == (0.5, 1.0, policy.sampling.max_new_tokens)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20"])
def test_a_trained_policy_is_sampled_from_all_candidates_unless_the_bias_is_accepted(cut: str) -> None:
    sampling = "policies.solver.sampling"
    with pytest.raises(RecipeError, match=r"cut candidates off.*accept_sampling_bias: true"):
        parse_recipe(GOOD, overrides=[f"{sampling}.{cut}"])
    accepted = parse_recipe(
        GOOD, overrides=[f"{sampling}.{cut}", f"{sampling}.accept_sampling_bias=true"]
    ).recipe
    assert accepted.policy("solver").sampling.accept_sampling_bias
    judged = f"policies.judge={{model: {{from_policy: solver}}, train: false, sampling: {{{cut.replace('=', ': ')}}}}}"
    assert parse_recipe(GOOD, overrides=[judged]).recipe.policy("judge").sampling.max_new_tokens == 256


@pytest.mark.parametrize("text", ["- a\n- b\n", "run: [", "just words"])
def test_text_that_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text)


def test_overrides_win_and_create_sections() -> None:
    overrides = ["run.steps=7", "trainer.optimizer.learning_rate=0", "run.name=other"]
    recipe = parse_recipe(GOOD, overrides=overrides).recipe
    assert (recipe.run.steps, recipe.trainer.optimizer.learning_rate, recipe.run.name) == (7, 0.0, "other")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.steps", "not of the form key.path=value"),
        ("=3", "not of the form key.path=value"),
        ("run.name.first=x", "run.name is a value, not a section"),
        ("run.steps=[", "not valid YAML"),
        ("run.stepz=3", r"run.stepz: unknown key; did you mean `steps`\?"),
        ("run.steps=many", "run.steps: Input should be a valid integer"),
        ("trainr.algorithm.loss=ppo", r"trainr: unknown key; did you mean `trainer`\?"),
        ("dataflow.group_size=0", "dataflow.group_size: Input should be greater"),
    ],
)
def test_a_mistaken_override_is_named_as_it_was_typed(override: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=f"^{re.escape(f'--set {override}')}: {complaint}"):
        parse_recipe(GOOD, source="recipe.yaml", overrides=[override])


def test_an_option_that_stands_for_a_key_is_named_instead() -> None:
    with pytest.raises(RecipeError, match=r"^--seed -1: run\.seed: "):
        parse_recipe(GOOD, overrides=["run.seed=-1"], options={"run.seed": "--seed"})


def test_what_the_file_and_an_override_say_together_names_both() -> None:
    with pytest.raises(
        RecipeError, match=r"^recipe.yaml:\d+: dataflow \(with --set dataflow.min_members=900\): "
    ):
        parse_recipe(
            f"{GOOD}\ndataflow: {{group_size: 4}}\n",
            source="recipe.yaml",
            overrides=["dataflow.min_members=900"],
        )


def test_a_folder_brings_its_code_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path)
    (tmp_path / "recipe.yaml").write_text(GOOD)
    (tmp_path / "recipe.py").write_text("class Data: ...\n")
    loaded = load_recipe(tmp_path)
    assert [file.path for file in loaded.code] == ["recipe.py"]
    assert loaded.code_sha256 == bundle_digest(loaded.code)


def test_data_and_folders_beside_recipe_py_travel_and_other_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    for name in (
        "recipe.py",
        "grading/__init__.py",
        "data/words 1.txt",
        "README.md",
        ".env",
        ".git/config",
        "x.yaml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "grading" / "__pycache__").mkdir()
    (tmp_path / "grading" / "__pycache__" / "a.pyc").write_text("")
    sent = {file.path: file.content.decode() for file in load_recipe(tmp_path).code}
    assert sent == {name: name for name in ("recipe.py", "grading/__init__.py", "data/words 1.txt")}


def test_the_file_that_is_too_much_is_named_with_its_size_and_so_is_one_with_a_strange_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    (tmp_path / "z.jsonl").write_bytes(bytes(2**20))
    assert load_recipe(tmp_path).code == (), "without recipe.py nothing travels"
    (tmp_path / "recipe.py").write_text("#")
    with pytest.raises(
        RecipeError, match=r"z.jsonl: with this file of 1,048,576 bytes .* limits are 500 files"
    ):
        load_recipe(tmp_path)
    (tmp_path / "z.jsonl").rename(tmp_path / ".z.jsonl")
    (tmp_path / "ä.txt").write_text("")
    with pytest.raises(RecipeError, match="its name cannot travel"):
        load_recipe(tmp_path)


def test_the_code_digest_depends_on_names_and_content_but_not_on_order() -> None:
    files = [CodeFile("a.py", b"1"), CodeFile("b.py", b"2")]
    assert bundle_digest(files) == bundle_digest(reversed(files))
    assert bundle_digest(files) != bundle_digest([CodeFile("a.py", b"2"), CodeFile("b.py", b"1")])
    assert bundle_digest([CodeFile("a", b"bc")]) != bundle_digest([CodeFile("ab", b"c")])


def test_every_key_is_documented() -> None:
    schema = Recipe.model_json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    # pydantic leaves a key's words out where they only repeat its section's, which fails here too.
    undocumented = [
        f"{section}.{key}"
        for section, definition in sections.items()
        for key, described in definition.get("properties", {}).items()
        if "description" not in described and "const" not in described  # `kind` is the name of its class
    ]
    assert undocumented == []


def test_of_many_errors_the_first_are_told() -> None:
    text = GOOD + "".join(f"unknown_{number}: 1\n" for number in range(50))
    with pytest.raises(RecipeError) as refused:
        parse_recipe(text)
    *_, last = lines = refused.value.message.splitlines()
    assert (len(lines), last) == (21, "… and 30 more")


LARGE = GOOD.replace("  solver:\n", "  solver:\n    sampling: {max_new_tokens: 7}\n")
SMALL = """\
extends: recipe.yaml
run:
  steps: 5
policies:
  solver:
    sampling: {max_new_tokens: null}
    model: {architecture: {hidden_size: 32}}
trainer:
  algorithm: {loss: {kind: gspo, low: 1.0e-4}}
"""


def write_files(folder: Path, **texts: str) -> Path:
    """Write NAME.yaml for each text; returns the last."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_a_file_that_extends_another_says_only_what_differs(tmp_path: Path) -> None:
    base = LARGE + "trainer:\n  algorithm: {loss: {kind: ppo_clip, high: 0.5}, aggregation: token_mean}\n"
    loaded = load_recipe(write_files(tmp_path, recipe=base, small=SMALL))
    solver = loaded.recipe.policy("solver")
    assert (loaded.recipe.run.name, solver.steps) == ("tiny", 5), (
        "mappings are laid over each other key by key"
    )
    assert solver.model.architecture
    assert (solver.model.architecture.hidden_size, solver.model.architecture.head_dim) == (32, 16)
    assert solver.sampling.max_new_tokens == 256, "null takes a key out"
    assert solver.trainer.algorithm.loss == Gspo(low=1e-4), "a choice replaces the other one as a whole"
    assert parse_recipe(loaded.yaml_text).recipe == loaded.recipe
    assert load_recipe(tmp_path).recipe.run.steps == 100, "the other file stays as it is"


def test_files_may_extend_one_another_and_options_win(tmp_path: Path) -> None:
    (tmp_path / "variants").mkdir()
    last = "extends: ../small.yaml\nrun: {name: tiny-2, steps: 6}\n"
    write_files(tmp_path, recipe=LARGE, small=SMALL, **{"variants/last": last})
    loaded = load_recipe(tmp_path / "variants" / "last.yaml", overrides=["run.seed=3"])
    run = loaded.recipe.run
    assert (run.name, run.steps, run.seed) == ("tiny-2", 6, 3)
    origins = [loaded.document.origin(("run", key)) for key in ("dataset", "name", "steps", "seed", "none")]
    names = [place and place.removeprefix(f"{tmp_path}/") for place in origins]
    assert names == [
        "recipe.yaml:3",
        "variants/last.yaml:2",
        "variants/last.yaml:2",
        "--set run.seed=3",
        None,
    ]


@pytest.mark.parametrize(
    ("small", "words"),
    [
        (SMALL.replace("steps: 5", "stesp: 5"), "small.yaml:3: run.stesp: unknown key; did you mean `steps`"),
        (
            SMALL.replace("hidden_size: 32", "head_dim: 15"),
            "small.yaml:7: policies.solver.model.architecture: ",
        ),
        ("extends: recipe.yaml\nraas: {reward: null, workflow: 7}", "small.yaml:2: raas.workflow: "),
        ("extends: none.yaml\n", r"small.yaml:1: extends: there is no file \S*none.yaml"),
        ("extends: [recipe.yaml]\n", "small.yaml:1: extends: .* is not the path of one file"),
        ("run: {}\nextends: small.yaml\n", r"small.yaml:2: extends leads in a circle: \S*small.yaml → "),
        ("extends: recipe.yaml\ntrainer: {algorithm: 7}\n", "small.yaml:2: trainer.algorithm: "),
    ],
)
def test_mistakes_are_named_in_the_file_that_has_them(tmp_path: Path, small: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(write_files(tmp_path, recipe=LARGE, small=small))


def test_a_mistake_in_what_is_extended_is_named_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe.yaml:2: run.nmae: unknown key"):
        load_recipe(write_files(tmp_path, recipe=GOOD.replace("name:", "nmae:"), small=SMALL))


def test_a_chain_of_files_has_a_bound(tmp_path: Path) -> None:
    texts = {f"r{number}": f"extends: r{number - 1}.yaml\n" for number in range(1, 11)}
    with pytest.raises(RecipeError, match="goes through more than 8 files"):
        load_recipe(write_files(tmp_path, r0=GOOD, **texts))


def test_text_in_no_file_extends_nothing() -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml:2: `extends` names a file beside this one"):
        parse_recipe("run: {}\nextends: recipe.yaml\n", source="r.yaml")


def test_a_file_without_code_beside_it_has_that_of_the_first_it_extends_with_some(tmp_path: Path) -> None:
    for name, text in (
        ("base", GOOD),
        ("middle", "extends: ../base/recipe.yaml"),
        ("top", "extends: ../middle/recipe.yaml"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(text)
    (tmp_path / "base" / "recipe.py").write_text("base = 1")
    assert load_recipe(tmp_path / "top").code == (CodeFile("recipe.py", b"base = 1"),)
    (tmp_path / "middle" / "recipe.py").write_text("middle = 1")
    assert load_recipe(tmp_path / "top").code == (CodeFile("recipe.py", b"middle = 1"),)

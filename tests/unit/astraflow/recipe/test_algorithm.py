"""A name means its published defaults, impossible values are refused, and the docs' table says the same."""

import re
from typing import get_args

import pytest
from pydantic import ValidationError

from astraflow.recipe import algorithm
from astraflow.recipe.algorithm import AlgorithmSettings, LossSettings, M2po
from support.source_tree import REPOSITORY

SMALL = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 8,
}  # fmt: skip

PUBLISHED = {
    "none": {},
    "ppo_clip": {"low": 0.2, "high": 0.28},
    "dual_clip": {"low": 0.2, "high": 0.28, "cap": 3.0},
    "m2po": {"budget": 0.04, "floor_low": 0.3, "floor_high": 0.5},
    "m2po_clip": {"budget": 0.01, "cap_low": 0.95, "cap_high": 20.0},
    "m2po_mask": {"budget": 0.04},
    "gspo": {"low": 3e-4, "high": 4e-4},
    "gmpo": {"low": 0.4, "high": 0.4},
    "cispo": {"min_ratio": 0.0, "max_ratio": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo": {"low": 0.2, "high": 0.2},
    "sft": {},
}


def _kinds(union: object) -> set[str]:
    return {member.model_fields["kind"].default for member in get_args(union)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_by_name_has_its_published_defaults(name: str) -> None:
    loss = AlgorithmSettings.model_validate({"loss": name}).loss
    assert loss.model_dump() == {"kind": name, **PUBLISHED[name]}


def test_no_name_is_left_out() -> None:
    assert _kinds(LossSettings) == set(PUBLISHED)


def test_without_settings_it_is_the_authors_m2po_over_tokens() -> None:
    settings = AlgorithmSettings()
    assert (settings.loss, settings.anchor) == (M2po(), algorithm.BehaviorAnchor())
    assert (settings.aggregation, settings.kl) == (algorithm.TokenMean(), None)


def test_a_mapping_changes_single_values_of_a_loss() -> None:
    settings = AlgorithmSettings.model_validate({"loss": {"kind": "ppo_clip", "low": 0.1}})
    assert settings.loss == algorithm.PpoClip(low=0.1, high=0.28)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": "gsop"}, "unknown kind 'gsop'; did you mean `gspo`"),
        ({"loss": 3}, "give a name, or a mapping with `kind`; known: none, ppo_clip"),
        ({"loss": {"kind": "ppo_clip", "low": 1.5}}, "less than or equal to 1"),
        ({"loss": {"kind": "dual_clip", "cap": 1.0}}, "greater than 1"),
        ({"loss": {"kind": "m2po", "budget": 0.0}}, "greater than 0"),
        ({"loss": {"kind": "cispo", "min_ratio": 2.0}}, "less than or equal to 1"),
        ({"mismatch": {"weight": {"kind": "tis", "cap": 0.0}}}, "greater than 0"),
        ({"mismatch": {"weight": "tiss"}}, "did you mean `tis`"),
        ({"preset": "dapoo"}, "unknown preset 'dapoo'; did you mean `dapo`"),
        ({"preset": "opd"}, "add `kl: {reference: {path: MODEL}}`"),
        ({"kl": {"coefficient": 1, "reference": {"path": "m", "version": 3}}}, "give exactly one of `path`"),
        ({"kl": {"coefficient": 1, "reference": {}}}, "a reference has nothing"),
        (
            {"kl": {"coefficient": 1, "reference": {"path": "m", "architecture": SMALL}}},
            "give `warm_start`, or",
        ),
        ({"preset": "dr_grpo"}, "add `aggregation: {kind: constant, length: N}`"),
        ({"aggregation": "constant"}, "Field required"),
        ({"aggregation": {"kind": "constant", "length": 0}}, "greater than or equal to 1"),
        ({"kl": {"coefficient": 0.0}}, "greater than 0"),
        ({"advantage": {"kind": "grpo", "eps": -1.0}}, "greater than or equal to 0"),
    ],
)
def test_bounds_are_checked(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        AlgorithmSettings.model_validate(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"anchor": "proximal"}, "or several minibatches or epochs"),
        ({"anchor": "bypass", "loss": "ppo_clip"}, "ppo_clip would never bind"),
        ({"anchor": "proximal", "loss": "sft"}, "leave the anchor out"),
        ({"advantage": "gae"}, "there is none; add `critic: {}`"),
        ({"critic": {}}, "advantage grpo does not use it"),
        ({"preset": "ppo", "advantage": "recipe:Own"}, "advantage recipe:Own does not use it"),
        ({"mismatch": {"weight": "tis"}}, "its ratio holds that weight already"),
    ],
)
def test_contradictions_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        AlgorithmSettings.model_validate(given).require_consistent()


@pytest.mark.parametrize("name", algorithm.PRESETS)
def test_a_preset_is_its_settings_and_what_stands_beside_it_wins(name: str) -> None:
    yours = {
        "dr_grpo": {"aggregation": {"kind": "constant", "length": 7}},
        "opd": {"kl": algorithm.PRESETS["opd"].get("kl", {}) | {"reference": {"path": "teacher"}}},
    }
    own = yours.get(name, {})
    settings = AlgorithmSettings.model_validate({"preset": name, **own})
    settings.require_consistent()
    assert settings == AlgorithmSettings.model_validate(algorithm.PRESETS[name] | {"preset": name} | own)
    # What is written out is read again as the same.
    assert AlgorithmSettings.model_validate(settings.model_dump(mode="json")) == settings
    changed = AlgorithmSettings.model_validate({"preset": name, "loss": "cispo", **own})
    assert (changed.loss, changed.advantage) == (algorithm.Cispo(), settings.advantage)


def test_a_key_of_a_presets_section_is_replaced_alone() -> None:
    kl = AlgorithmSettings.model_validate({"preset": "grpo", "kl": {"coefficient": 0.5}}).kl
    assert kl == algorithm.KlSettings(coefficient=0.5, reference=algorithm.KlReference.MODEL)


def test_versions_of_an_adapter_are_no_reference() -> None:
    settings = AlgorithmSettings.model_validate({"kl": {"coefficient": 1, "reference": {"version": 3}}})
    settings.require_consistent()
    with pytest.raises(ValueError, match="versions of an adapter are no models"):
        settings.require_consistent(is_adapter=True)


def test_weights_follow_the_anchor_where_none_is_given() -> None:
    kinds = {
        anchor: AlgorithmSettings.model_validate({"anchor": anchor}) for anchor in ("behavior", "bypass")
    }
    assert {name: settings.mismatch_weight.kind for name, settings in kinds.items()} == {
        "behavior": "none",
        "bypass": "tis",
    }


def test_the_docs_name_the_source_of_every_preset_and_its_numbers() -> None:
    """So that a coefficient is changed in one place only with the other, and with where it is from."""
    text = (REPOSITORY / "docs" / "trainer.md").read_text().split("### Presets")[1].split("\n### ")[0]
    rows = {
        name: (form, source)
        for name, form, source in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", text, re.M)
    }
    assert rows.keys() == algorithm.PRESETS.keys()
    for name, preset in algorithm.PRESETS.items():
        form, source = rows[name]
        assert source or name == "sft"
        kl = preset.get("kl", {})
        coefficient = [f"KL {kl['estimator']} of {kl['coefficient']}"] if kl else []
        for words in [*coefficient, *(["`token_mean`"] if name in ("ppo", "dapo", "m2po", "cispo") else [])]:
            assert words in form, (name, words)
        assert ("`ppo_clip` 0.2 and 0.2" in form and "0.28" not in form) == (
            preset["loss"] == algorithm.PRESETS["grpo"]["loss"]
        )


def test_the_docs_table_has_every_loss_with_its_defaults() -> None:
    text = (REPOSITORY / "docs" / "trainer.md").read_text()
    row = re.compile(r"^\| `(\w+)`(?: \(default\))? \| ([\w ,.]*?) ?\| ", re.MULTILINE)
    expected = []
    for member in get_args(LossSettings):
        kind, *values = [(name, field.default) for name, field in member.model_fields.items()]
        expected.append((kind[1], ", ".join(f"{name} {default}" for name, default in values)))
    assert row.findall(text.split("| Loss |")[1])[: len(expected)] == expected

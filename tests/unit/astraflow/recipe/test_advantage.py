"""A name means its published form, what cannot mean anything is refused, and the page's table says the same."""

import re
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from astraflow.recipe.advantage import AdvantageSettings, AnyAdvantage
from astraflow.recipe.algorithm import AlgorithmSettings
from support.source_tree import REPOSITORY

TASK_AND_ROLE = ("task", "role")
# Groups, baseline, scale, epsilon, a group of one.
PUBLISHED: dict[str, tuple[object, ...]] = {
    "grpo": (TASK_AND_ROLE, "group", "group", 1e-4, "zero"),
    "dr_grpo": (TASK_AND_ROLE, "group", "none", 1e-4, "zero"),
    "rloo": (TASK_AND_ROLE, "leave_one_out", "none", 1e-4, "reward"),
    "reinforce": (TASK_AND_ROLE, "none", "none", 1e-4, "zero"),
    "none": (TASK_AND_ROLE, "own", "none", 1e-4, "zero"),
    "reinforce_pp": (TASK_AND_ROLE, "none", "none", 1e-4, "zero"),
    "reinforce_pp_baseline": (TASK_AND_ROLE, "group", "none", 1e-4, "zero"),
    "gae": (TASK_AND_ROLE, "none", "none", 1e-4, "zero"),
    "maxrl": (TASK_AND_ROLE, "group", "group_mean", 0.0, "zero"),
    "opo": (TASK_AND_ROLE, "length_weighted", "none", 1e-4, "zero"),
    "dr_mas": (TASK_AND_ROLE, "group", "group", 1e-6, "reward"),
    "joint": (("task",), "group", "group", 1e-6, "reward"),
    "at_grpo": (("task", "turn", "role"), "group", "none", 1e-4, "zero"),
    "designer_executor": (("episode", "role"), "group", "group", 1e-4, "zero"),
    "hierarchical": (("episode", "role"), "group", "none", 1e-4, "zero"),
    "rae": (("source", "role"), "running", "none", 1e-4, "zero"),
    "margin": (TASK_AND_ROLE, "group", "group", 1e-9, "zero"),
    "quality": (TASK_AND_ROLE, "group", "group", 1e-9, "zero"),
}


def _made(advantage: object) -> AdvantageSettings:
    made = AlgorithmSettings.model_validate({"advantage": advantage}).advantage
    assert isinstance(made, AdvantageSettings)
    return made


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_advantage_by_name_has_its_published_form(name: str) -> None:
    made = _made(name)
    form = (made.group_by, made.baseline, made.scale, made.eps, made.singleton)
    assert (form, made.unbiased, made.decay, made.shaping_weight) == (PUBLISHED[name], True, 0.95, 0.5)
    assert (made.whiten, made.discount) == (name.startswith(("reinforce_pp", "gae")), 1.0)


def test_no_name_is_left_out_here_or_in_the_docs() -> None:
    kinds = [member.model_fields["kind"].default for member in get_args(AnyAdvantage)]
    page = (REPOSITORY / "docs" / "roles.md").read_text().split("## Advantages of roles")[1]
    assert (
        list(PUBLISHED)
        == kinds
        == re.findall(r"^\| `(\w+)`(?: \(default\))? \|", page, re.MULTILINE)[: len(kinds)]
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "grpo", "group_by": ["task", "rolle"]}, "'task', 'role', 'episode', 'turn' or 'source'"),
        ({"kind": "grpo", "group_by": ["task", "task"]}, "names a part twice"),
        ({"kind": "grpo", "min_rows": 2}, "add `episode` to group_by"),
        (
            {"kind": "gae", "baseline": "group"},
            "its baseline is the critic; take `baseline` and `scale` from it",
        ),
        ({"kind": "gae", "scale": "batch"}, "gae has baseline none and scale batch"),
        ({"kind": "gae", "lam": 1.5}, "less than or equal to 1"),
        ({"kind": "opo", "per_episode": True}, "weighs rows by their lengths"),
        ({"kind": "hierarchical", "per_episode": True}, "hold one each; take `episode`"),
        ({"kind": "margin", "group_by": ["task", "turn"]}, "keeps them apart; take `turn`"),
        ({"kind": "rae", "group_by": ["task", "role"]}, "for example [source, role]"),
        ({"kind": "rae", "group_by": ["source"]}, "give `role`"),
        ({"kind": "rae", "decay": 1.0}, "less than 1"),
        ("at_grop", "did you mean `at_grpo`"),
    ],
)
def test_what_cannot_mean_anything_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        _made(given)

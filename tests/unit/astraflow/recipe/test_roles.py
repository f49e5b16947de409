"""Which policy plays which role, and whether a workflow fits; every refusal names the nearest name and the remedy."""

import re
from types import SimpleNamespace

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe import Recipe, declared_roles, workflow_roles
from astraflow.recipe.advantage import Rae
from astraflow.recipe.file import parse_recipe
from astraflow.recipe.model import LoraSettings, SnapshotSettings
from astraflow.recipe.plugin_settings import PluginSettings

POLICIES = "solver: {model: {path: p}}, verifier: {model: {path: q}}"


BUILT = (
    "{architecture: {hidden_size: 16, num_hidden_layers: 1, head_dim: 8, intermediate_size: 32, "
    "num_attention_heads: 2, num_key_value_heads: 1}, warm_start: {demonstrations: 'recipe:D', steps: 1}, "
    "tokenizer: TOKENIZER}"
)


def recipe(roles: str = "{}", *, policies: str = POLICIES, dataflow: str = "{}") -> Recipe:
    return parse_recipe(
        f"""
run: {{name: r, dataset: "recipe:D"}}
policies: {{{policies}}}
roles: {roles}
dataflow: {dataflow}
raas: {{reward: "recipe:R"}}
"""
    ).recipe


def played(found: Recipe, declared: tuple[str, ...] | None) -> dict[str, str]:
    """The policy behind each name that the workflow uses."""
    roles = workflow_roles(declared, roles=found.resolved_roles, are_given=bool(found.roles))
    return {name: role.policy_id for name, role in roles.items()}


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("{}", {"solver": ("solver", True), "verifier": ("verifier", True)}),
        (
            "{plan: solver, work: {policy: solver}, check: verifier}",
            {"plan": ("solver", True), "work": ("solver", True), "check": ("verifier", True)},
        ),
        (
            "{plan: solver, judge: {policy: solver, train: false}, check: verifier}",
            {"plan": ("solver", True), "judge": ("solver", False), "check": ("verifier", True)},
        ),
    ],
)
def test_a_recipe_gives_each_role_a_policy(roles: str, expected: dict[str, tuple[str, bool]]) -> None:
    found = recipe(roles).resolved_roles
    assert {name: (role.policy_id, role.is_trained) for name, role in found.items()} == expected
    assert {role.name for role in found.values()} == set(expected)


def test_a_role_may_have_an_advantage_of_its_own_which_its_policy_knows() -> None:
    own = "{kind: rae, decay: 0.9}"
    found = recipe(
        f"{{plan: solver, work: {{policy: solver, advantage: {own}}}, "
        "check: {policy: verifier, advantage: {use: 'recipe:A', with: {x: 1}}}}"
    )
    assert found.policy("solver").advantages == {"work": Rae(decay=0.9)}
    assert found.policy("verifier").advantages == {
        "check": PluginSettings.model_validate({"use": "recipe:A", "with": {"x": 1}})
    }
    again = Recipe.model_validate(found.model_dump(mode="json", exclude_unset=True))
    assert again == found


def test_the_text_that_nodes_get_gives_the_same_roles() -> None:
    text = "{plan: solver, judge: {policy: solver, train: false}, check: verifier}"
    first = parse_recipe(
        f"run: {{name: r, dataset: 'recipe:D'}}\npolicies: {{{POLICIES}}}\nroles: {text}\nraas: {{reward: 'recipe:R'}}"
    )
    assert dict(parse_recipe(first.yaml_text).recipe.resolved_roles) == dict(first.recipe.resolved_roles)


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        (
            "{solver: solver, verifier: verifer}",
            ("recipe:4: roles.verifier: ", "'verifer'", "did you mean 'verifier'"),
        ),
        ("{solver: solver}", ("no role", "'verifier'", "take it out")),
        ("{solver: solver, verifier: {policy: verifier, train: false}}", ("'verifier'", "none of its roles")),
        ("{Solver: solver, verifier: verifier}", ("Solver",)),
        (
            "{solver: solver, verifier: verifier, j: {policy: solver, train: false, advantage: rloo}}",
            ("roles.j", "not trained", "take `advantage`"),
        ),
        ("{solver: {policy: solver, advantage: raee}, verifier: verifier}", ("did you mean `rae`",)),
        (
            "{solver: {policy: solver, advantage: {kind: rae, gruop_by: [role]}}, verifier: verifier}",
            ("recipe:4: roles.solver.advantage.gruop_by: ", "did you mean `group_by`"),
        ),
        ("{solver: {policy: solver, trian: false}, verifier: verifier}", ("did you mean `train`",)),
    ],
)
def test_roles_that_cannot_work_are_refused(roles: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(roles)
    assert all(part in refused.value.message for part in parts), refused.value.message


def test_a_workflow_without_roles_takes_those_of_the_recipe() -> None:
    assert played(recipe(), None) == {"solver": "solver", "verifier": "verifier"}


def test_the_only_policy_plays_the_only_role_whatever_its_name() -> None:
    assert played(recipe(policies="solver: {model: {path: p}}"), ("player",)) == {"player": "solver"}


@pytest.mark.parametrize(
    ("roles", "declared", "parts"),
    [
        ("{}", ("solver", "critic"), ("'critic'", "roles: {solver: solver, critic: ")),
        ("{solvr: solver, verifier: verifier}", ("solver", "verifier"), ("did you mean 'solvr'",)),
        ("{a: solver, b: verifier, c: solver}", ("a", "b"), ("'c'", "take them out")),
    ],
)
def test_roles_that_only_one_side_has_are_refused(
    roles: str, declared: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="workflow") as refused:
        played(recipe(roles), declared)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_two_roles_of_the_only_policy_are_written_down_in_the_recipe() -> None:
    with pytest.raises(ValueError, match=r"roles: \{planner: solver, worker: solver\}"):
        played(recipe(policies="solver: {model: {path: p}}"), ("planner", "worker"))


def test_a_policy_that_is_not_trained_plays_roles_that_are_not() -> None:
    roles = recipe(
        policies="solver: {model: {path: p}}, judge: {model: {path: q}, train: false}"
    ).resolved_roles
    assert {name: role.is_trained for name, role in roles.items()} == {"solver": True, "judge": False}


def test_a_policy_starts_from_the_policy_that_the_last_of_a_chain_names() -> None:
    found = recipe(
        policies="a: {model: {from_policy: b}}, b: {model: {from_policy: c}}, c: {model: {path: there}}, "
        f"d: {{model: {BUILT.replace('TOKENIZER', '{from_policy: e}')}}}, "
        f"e: {{model: {BUILT.replace('TOKENIZER', '{vocab_size: 300}')}}}, f: {{model: {{from_policy: d}}}}"
    )
    assert [found.policy(name).model.path for name in "abc"] == ["there"] * 3
    assert [found.policy(name).tokenizer_of for name in "abcdef"] == ["c", "c", "c", "e", "e", "e"]
    assert found.policy("f").model == found.policy("d").model


@pytest.mark.parametrize(
    ("policies", "parts"),
    [
        ("a: {model: {path: p}, train: false}", ("no policy is trained",)),
        ("a: {model: {from_policy: b}}, b: {model: {from_policy: a}}", ("a → b → a", "circle")),
        (
            "a: {model: {from_policy: sover}}, solver: {model: {path: p}}",
            ("'sover'", "did you mean 'solver'"),
        ),
        ("a: {model: {from_policy: b, path: p}}, b: {model: {path: p}}", ("exactly one of",)),
        (
            f"a: {{model: {BUILT.replace('TOKENIZER', '{from_policy: b}')}}}, b: {{model: {{path: p}}}}",
            ("'b' trains no tokenizer", "architecture"),
        ),
    ],
)
def test_policies_that_cannot_start_are_refused(policies: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(policies=policies)
    assert all(part in refused.value.message for part in parts), refused.value.message


def test_admitting_all_needs_room_for_every_role_of_a_policy() -> None:
    flow = "{admit: all, groups_per_step: 2, max_staleness: 0}"
    with pytest.raises(RecipeError, match=r"2 trained roles, .* room for 1 groups"):
        recipe("{plan: solver, work: solver}", policies="solver: {model: {path: p}}", dataflow=flow)
    assert recipe("{plan: solver, work: solver, check: verifier}", dataflow="{admit: all}")
    with pytest.raises(RecipeError, match="the last group of a batch comes alone"):
        recipe("{plan: solver, work: solver, check: verifier}", dataflow="{admit: all, barrier: batch}")


@pytest.mark.parametrize(
    ("workflow", "reward", "declared"),
    [
        (None, ("judge",), None),
        (("solver",), ("judge",), ("solver", "judge")),
        (("solver",), (), ("solver",)),
    ],
)
def test_the_roles_that_a_reward_asks_join_those_of_the_workflow(
    workflow: tuple[str, ...] | None, reward: tuple[str, ...], declared: tuple[str, ...] | None
) -> None:
    assert declared_roles(SimpleNamespace(roles=workflow), SimpleNamespace(roles=reward)) == declared


def _with_rival(rival: str) -> Recipe:
    return parse_recipe(
        "run: {name: r, dataset: 'recipe:D'}\n"
        "policies: {player: {model: {path: m}}, judge: {train: false, model: {path: j}}, "
        f"rival: {rival}}}\nraas: {{reward: 'recipe:R'}}"
    ).recipe


def test_a_snapshot_has_the_model_of_the_policy_that_it_is_of() -> None:
    recipe = _with_rival("{train: false, model: {snapshot: {of: player, every_versions: 4}}}")
    assert recipe.policy("rival").model.path == "m"
    assert recipe.snapshots == {"rival": SnapshotSettings(of="player", every_versions=4)}
    assert recipe.served_policies == ("player", "judge", "rival")


@pytest.mark.parametrize(
    ("rival", "problem"),
    [
        ("{model: {snapshot: {of: player, version: 4}}}", "cannot be trained; set `train: false`"),
        ("{train: false, model: {snapshot: {of: playr, version: 4}}}", "did you mean 'player'"),
        ("{train: false, model: {snapshot: {of: judge, version: 4}}}", "'judge' is not trained"),
        (
            "{train: false, model: {snapshot: {of: player}}}",
            "give `version`, which stays, or `every_versions`",
        ),
        (
            "{train: false, model: {snapshot: {of: player, version: 4, every_versions: 2}}}",
            "give `version`, which stays, or `every_versions`",
        ),
        ("{train: false, model: {snapshot: {of: player, version: 4, keep: 2}}}", "keep 2 is for a pool"),
        ("{train: false, model: {path: m, snapshot: {of: player, version: 4}}}", "exactly one of"),
        ("{train: false, model: {snapshot: {of: rival, version: 4}}}", "circle, rival → rival"),
    ],
)
def test_a_snapshot_that_cannot_be_played_is_refused(rival: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        _with_rival(rival)


def _with_adapter(solver: str, *, base: str = "{train: false, model: {path: b}}", more: str = "") -> Recipe:
    return parse_recipe(
        "run: {name: r, dataset: 'recipe:D'}\n"
        f"policies: {{base: {base}, solver: {solver}, verifier: {{model: {{lora: {{of: base, rank: 8}}}}}}{more}}}\n"
        "raas: {reward: 'recipe:R'}"
    ).recipe


def test_an_adapter_has_the_model_of_its_base_which_needs_no_role() -> None:
    recipe = _with_adapter("{model: {lora: {of: base}}}")
    assert recipe.policy("solver").model.path == "b"
    assert recipe.policy("solver").lora == LoraSettings(of="base")
    assert recipe.policy("base").lora is None
    assert list(recipe.resolved_roles) == ["solver", "verifier"]
    assert recipe.served_policies == ("base", "solver", "verifier")
    assert recipe.engine_policies == ("base",)


def test_past_versions_of_an_adapter_are_adapters() -> None:
    rival = ", rival: {train: false, model: {snapshot: {of: solver, version: 0}}}"
    recipe = _with_adapter("{model: {lora: {of: base}}}", more=rival)
    assert recipe.adapters["rival"] == LoraSettings(of="base")
    assert recipe.policy("rival").model.path == "b"


@pytest.mark.parametrize(
    ("solver", "base", "problem"),
    [
        ("{model: {lora: {of: bass}}}", "{train: false, model: {path: b}}", "did you mean 'base'"),
        (
            "{model: {lora: {of: base}}}",
            "{model: {path: b}}",
            "'base' is trained, and an adapter is of weights that",
        ),
        ("{model: {lora: {of: verifier}}}", "{train: false, model: {path: b}}", "'verifier' is trained"),
        ("{model: {lora: {of: solver}}}", "{train: false, model: {path: b}}", "`lora` leads in a circle"),
        (
            "{model: {path: m}}",
            "{train: false, model: {snapshot: {of: solver, version: 0}}}",
            "policy 'base' has no model of its own",
        ),
        ("{model: {path: m, lora: {of: base}}}", "{train: false, model: {path: b}}", "exactly one of"),
        (
            "{model: {lora: {of: base, rank: 0}}}",
            "{train: false, model: {path: b}}",
            "greater than or equal to 1",
        ),
    ],
)
def test_an_adapter_of_nothing_is_refused(solver: str, base: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        _with_adapter(solver, base=base)


@pytest.mark.parametrize(
    ("seats", "problem"),
    [
        ("[plan, wrok]", "there is no role 'wrok'; did you mean 'work'"),
        ("[plan, plan]", "names 'plan' twice"),
    ],
)
def test_seats_that_cannot_change_are_refused(seats: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        parse_recipe(
            f"run: {{name: r, dataset: 'recipe:D'}}\npolicies: {{{POLICIES}}}\n"
            "roles: {plan: solver, work: verifier}\n"
            f"raas: {{reward: 'recipe:R', swap_seats: {seats}}}"
        )

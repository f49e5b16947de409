"""The ready-made plug-ins of a recipe in any order, with any settings: each is asked, none fails, all are obeyed."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astraflow.plugins import Group, ReadyGroup, StepRequest, TaskSpec, TrajectorySummary
from astraflow.recipe.dataflow import DataflowSettings
from astraflow.recipe.file import parse_recipe
from astraflow_dataflow.batches.selecting import choose
from astraflow_dataflow.rules.groups import Rules, filter_verdict
from astraflow_dataflow.runs.data_plugins import DataPlugins
from astraflow_dataflow.tasks.curation import propose
from astraflow_dataflow.tasks.observing import observe
from astraflow_kit.plugins import RecipeSource
from support.dataflow_world import recipe_text

Named = dict[str, Any]

BUILT_IN = "astraflow_dataflow.plugins"
share = st.floats(0, 1)


def plugin(room: str, name: str, **settings: st.SearchStrategy[Any]) -> st.SearchStrategy[Named]:
    """A recipe's entry of a plug-in, with settings as drawn."""
    return st.fixed_dictionaries(
        {
            "use": st.just(f"{BUILT_IN}.{room}.{name}"),
            "with": st.fixed_dictionaries({}, optional=settings),
        }
    )


CURATORS = st.lists(
    st.one_of(
        plugin("curators", "greso:Greso", base=share, easy_floor=share, warmup_tasks=st.integers(0, 40)),
        plugin("curators", "skip_solved:SkipSolved", threshold=st.floats(0.1, 1), memory=st.floats(0, 0.9)),
        plugin("curators", "pass_rate_buckets:PassRateBuckets", memory=st.floats(0, 0.9)),
        plugin("curators", "difficulty_curriculum:DifficultyCurriculum", success=share, groups=st.just(2)),
        plugin("curators", "mix_sources:MixSources").map(
            lambda made: made | {"with": {"weights": {"a": 3, "b": 1}, "quotas": {"a": 7}}}
        ),
    ),
    max_size=4,
)
FILTERS = st.lists(
    st.one_of(
        plugin("filters", "drop_zero_advantage:DropZeroAdvantage"),
        plugin("filters", "length:Length", min_tokens=st.integers(0, 5), max_outside=share),
        plugin("filters", "overlong:Overlong", max_share=share),
        plugin("filters", "duplicates:Duplicates", max_share=share),
        plugin("filters", "reward_range:RewardRange", lowest=share),
        plugin("filters", "metric_range:MetricRange").map(
            lambda made: made | {"with": {"metric": "m", "highest": 0.5}}
        ),
        plugin("filters", "agreement:Agreement", highest=st.floats(0.01, 1)),
    ),
    max_size=4,
)
within = st.sampled_from(["deadline", "arrival", "freshest"])
SELECTORS = st.one_of(
    plugin("selectors", "edf:Edf"),
    plugin("selectors", "fifo:Fifo"),
    plugin("selectors", "freshest_first:FreshestFirst"),
    plugin("selectors", "balance_sources:BalanceSources", within=within),
    plugin("selectors", "balance_lengths:BalanceLengths", within=within),
)
TASKS = [
    TaskSpec(f"t{n}", (), data={"problem": n % 5, "difficulty": n % 7}, source="ab"[n % 2] if n % 3 else "a")
    for n in range(24)
]
TRAJECTORY = st.builds(
    TrajectorySummary,
    reward=st.sampled_from([0.0, 1.0]),
    num_trainable_tokens=st.integers(1, 8),
    min_version=st.integers(0, 3),
    max_version=st.integers(3, 5),
    finish_reason=st.sampled_from(["stop", "length"]),
    metrics=st.sampled_from([{}, {"m": 0.0}, {"m": 1.0}]),
    response_digest=st.integers(1, 3),
    node_id=st.just("n"),
)
GROUPS = st.builds(
    Group,
    task=st.sampled_from(TASKS),
    trajectories=st.lists(TRAJECTORY, min_size=1, max_size=4).map(tuple),
    policy=st.just("solver"),
)


RECIPE = parse_recipe(recipe_text()).recipe


def made(**flow: Any) -> tuple[DataPlugins, Rules]:
    """The plug-ins of a recipe, and its rules for groups."""
    settings = DataflowSettings.model_validate(RECIPE.dataflow.model_dump(by_alias=True) | flow)
    recipe = RECIPE.model_copy(update={"dataflow": settings})
    plugins = DataPlugins.make(recipe, RecipeSource())
    return plugins, plugins.rules(settings)


@given(filters=FILTERS, group=GROUPS, order=st.randoms())
def test_a_group_is_kept_when_each_filter_keeps_it_in_whatever_order(
    filters: list[Named], group: Group, order: Any
) -> None:
    alone = [filter_verdict(group, rules=made(filters=[one])[1]) for one in filters]
    order.shuffle(filters)
    plugins, rules = made(filters=filters)
    assert filter_verdict(group, rules=rules) == ("ready" if set(alone) <= {"ready"} else "filtered")
    assert plugins.faults.all() == []


@given(curators=CURATORS, groups=st.lists(GROUPS, max_size=6))
def test_curators_leave_tasks_out_in_whatever_order_and_decide_alike_when_they_are_asked_again(
    curators: list[Named], groups: list[Group]
) -> None:
    plugins, _ = made(curators=curators)

    def proposed() -> list[str]:
        left: Any = TASKS
        for curator in plugins.curators:
            left = propose(curator, left, plugins.faults)
        return [task.task_id for task in left]

    for curator in plugins.curators:
        observe(curator, groups, plugins.faults)
    chosen = proposed()
    assert chosen == [task.task_id for task in TASKS if task.task_id in chosen]
    assert proposed() == chosen
    assert plugins.faults.all() == []


@given(selector=SELECTORS, groups=st.lists(GROUPS, min_size=1, max_size=9), data=st.data())
def test_every_selector_answers_with_as_many_groups_as_the_step_takes(
    selector: Named, groups: list[Group], data: st.DataObject
) -> None:
    ready = [
        ReadyGroup(group_id=str(n), arrival=n, source=group.task.source, trajectories=group.trajectories)
        for n, group in enumerate(groups)
    ]
    plugins, _ = made(selector=selector)
    assert plugins.selector is not None
    request = StepRequest(
        policy="solver", step=1, base_version=5, num_groups=1, max_staleness=5, num_outstanding=0
    )
    request = replace(request, num_groups=data.draw(st.integers(1, len(ready))))
    selection = choose(plugins.selector, ready, request, plugins.faults)
    assert plugins.faults.all() == []
    assert selection is not None
    assert len({*selection.chosen}) == request.num_groups

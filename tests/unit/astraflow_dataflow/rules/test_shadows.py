"""Counts of shadow plug-ins, and what filters make of them."""

from astraflow.plugins import Group
from astraflow_dataflow.rules.groups import Rules, filter_verdict
from astraflow_dataflow.rules.shadows import Shadow, Shadows
from support.groups import group


def rewarded(group: Group) -> bool:
    return max(group.rewards) > 0


def equal(group: Group) -> bool:
    return len(set(group.rewards)) == 1


def broken(group: Group) -> bool:
    raise LookupError("no table")


def test_decisions_are_added_up_by_plugin() -> None:
    shadows = Shadows()
    for kind, name, asked, differs in [("filter", "b", 1, 0), ("filter", "a", 2, 1), ("filter", "b", 4, 3)]:
        shadows.note(kind, name, asked=asked, differs=differs, refused=asked)
    assert shadows.all() == [Shadow("filter", "a", 2, 1, 2), Shadow("filter", "b", 5, 3, 5)]


def test_a_shadow_filter_is_counted_and_not_obeyed() -> None:
    rules = Rules(
        min_members=None,
        filters=(("rewarded", rewarded),),
        shadow_filters=(("equal", equal), ("broken", broken)),
    )
    verdicts = [filter_verdict(group(*rewards), rules=rules) for rewards in [(1, 1), (0, 1), (0, 0), (0, -1)]]
    assert verdicts == ["ready", "ready", "filtered", "filtered"]
    # It would have dropped the second and the last group, and kept the third. One that fails decided nothing.
    assert rules.shadows.all() == [Shadow("filter", "equal", 4, 2, 2)]
    assert [fault.count for fault in rules.faults.all()] == [4]

"""How long a node takes to follow versions, as its session measures it."""

from astraflow_dataflow.tasks.sessions import Following


def test_a_version_is_followed_from_its_notice_until_it_is_served() -> None:
    following = Following()
    following.told("solver", 3, now_s=10.0)
    assert following.served({"solver": 2}, now_s=11.0) == {}
    assert following.served({"solver": 3}, now_s=12.5) == {"follow_ms": 2500}
    assert following.served({"solver": 3}, now_s=13.0) == {}, "it is new once"


def test_a_version_that_was_passed_over_is_forgotten_and_the_slowest_policy_counts() -> None:
    following = Following()
    following.told("solver", 3, now_s=0.0)
    following.told("solver", 4, now_s=5.0)
    following.told("judge", 1, now_s=4.0)
    assert following.served({"solver": 4, "judge": 1}, now_s=6.0) == {"follow_ms": 2000}
    assert following.served({"solver": 4, "judge": 1}, now_s=9.0) == {}

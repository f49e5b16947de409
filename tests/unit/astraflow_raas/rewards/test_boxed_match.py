"""The ready-made reward, as a recipe's own test would use it: no service, no engine."""

import pytest

from astraflow.plugins import TaskSpec
from astraflow_raas.rewards.boxed_match import BoxedMatch, last_boxed


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so \boxed{7}", "7", 1.0),
        (r"so \boxed{8}", "7", 0.0),
        ("so 7", "7", 0.0),
        (r"\boxed{1} no, \boxed{7}", "7", 1.0),
        (r"\boxed{7} no, \boxed{1}", "7", 0.0),
        (r"\boxed{7", "7", 0.0),
        (r"\boxed{7} and \boxed{8", "7", 1.0),
        (r"\boxed{7.0}", "7", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{$12}", "12", 1.0),
        (r"\boxed{10,00}", "1000", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{nan}", "nan", 1.0),
        (r"\boxed{nan}", "7", 0.0),
        (r"\boxed{}", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_last_complete_box_decides(completion: str, answer: str, reward: float) -> None:
    task = TaskSpec("t", (), {"answer": answer})
    assert BoxedMatch()(task, completion) == reward


def test_braces_inside_a_box_are_balanced() -> None:
    assert last_boxed(r"\boxed{a{b{c}}d} tail }") == "a{b{c}}d"

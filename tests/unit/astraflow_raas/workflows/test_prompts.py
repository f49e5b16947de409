"""Prompts that are filled in keep every brace that is not a named place."""

from astraflow.plugins import Message
from astraflow_raas.workflows.prompts import fill, problem_of


def test_named_places_are_filled_once_and_other_braces_stay() -> None:
    template = r"{problem} \boxed{x} {} {plan} {problem}"
    assert fill(template, problem="{plan} {a}", plan="P") == r"{plan} {a} \boxed{x} {} P {plan} {a}"


def test_a_problem_is_all_that_the_system_did_not_say() -> None:
    messages = [Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert problem_of(messages) == "a\n\nb\n\nc"

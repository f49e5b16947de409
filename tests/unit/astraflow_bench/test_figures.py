"""A figure with a limit is a target, and CPU time counts whole families of processes."""

import subprocess
import sys
import time

import pytest

from astraflow_bench.figures import Figure, cpu_seconds, least_cpu_seconds, medians


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({}, None),
        ({"least": 2.0}, True),
        ({"least": 2.1}, False),
        ({"most": 2.0}, True),
        ({"most": 1.9}, False),
    ],
)
def test_a_target_is_met_within_its_limits(limits: dict[str, float], met: bool | None) -> None:
    assert Figure(what="it", subject="", value=2.0, unit="×", **limits).met is met
    assert Figure(what="it", subject="", value=None, unit="no GPU", **limits).met is None


def test_the_cpu_time_of_a_child_counts_and_that_of_a_process_which_is_gone_does_not() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds([process.pid]) >= 0.3 > cpu_seconds([process.pid], with_children=False)
        process.communicate(b"\n")
    assert cpu_seconds([process.pid]) == 0.0


def test_of_equal_rounds_each_figure_is_the_median_of_what_was_measured() -> None:
    def measured(*values: float | None) -> list[Figure]:
        return [
            Figure(what=f"{number}", subject="", value=value, unit="µs")
            for number, value in enumerate(values)
        ]

    rounds = [measured(9.0, 2.0, None), measured(1.0, None, None), measured(3.0, 4.0, None)]
    assert medians(rounds) == measured(3.0, 3.0, None)
    with pytest.raises(ValueError, match="shorter"):
        medians([measured(1.0), measured()])


def test_works_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []
    spent = least_cpu_seconds(
        {"slow": lambda: _burn(order, "slow", 0.2), "fast": lambda: _burn(order, "fast", 0.0)}, repeats=2
    )
    assert order == ["slow", "fast"] * 3
    assert spent["slow"] >= 0.2 > spent["fast"]


def _burn(order: list[str], name: str, cpu_s: float) -> None:
    order.append(name)
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass

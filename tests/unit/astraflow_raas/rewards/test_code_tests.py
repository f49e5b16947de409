"""Programs against tests of every format, in a real sandbox where there is one."""

import shutil
from typing import Any

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import Reward, RewardFailed, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, make
from astraflow_raas.rewards.code_tests import CodeTests, code_of
from support.sandbox import needs_bubblewrap

HUMANEVAL = {
    "prompt": 'import math\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": (
        "def check(candidate):\n    assert math.isclose(candidate(2.0), 4 * math.pi)\n    try:\n        candidate(-1)\n"
        "        assert False\n    except ValueError:\n        pass"
    ),
}
AREA = "    if r < 0:\n        raise ValueError(r)\n    return math.pi * r * r\n"
MBPP = {
    "test_imports": ["import math"],
    "test_list": [
        "assert total([Pair(1, 2), Pair(3, 4)]) == 10",
        "assert math.isclose(total([Pair(0.1, 0.2)]), 0.3)",
        "assert list(firsts([Pair(1, 2), Pair(3, 4)])) == [1, 3]",
        "assert seen == {(1, 2): b'x', None: {1j}}",
    ],
}
PAIRS = """
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
def total(pairs): return sum(pair.a + pair.b for pair in pairs)
def firsts(pairs): return (pair.a for pair in pairs)
"""
STDIO = {
    "stdio": [{"stdin": "3 4\n", "stdout": "7\n0.75\n"}, {"stdin": "1 3\n", "stdout": "4\n0.333333333\n"}]
}
SUM = (
    "a, b = map(int, input().split())\nif __name__ == '__main__':\n    print(a + b, ' ')\n    print(a / b)\n"
)
CALLS = {
    "entry_point": "Solution.pairs",
    "calls": [
        {"arguments": [[1, 2]], "result": [[1, 1.0], [2, 0.5]]},
        {"arguments": [[]], "result": []},
    ],
}
SOLUTION = "class Solution:\n    def pairs(self, xs): return [(x, 1 / x) for x in xs]\n"


async def scored(data: dict[str, Any], completion: str, **settings: Any) -> tuple[float, float]:
    score = await CodeTests(**settings)(TaskSpec("t1", (), data), completion)
    return score.reward, score.metrics["tests_passed"]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("data", "completion", "share"),
    [
        (HUMANEVAL, AREA, 1.0),
        (HUMANEVAL, f"Like this:\n```python\n{HUMANEVAL['prompt']}{AREA}```\nDone.", 1.0),
        (HUMANEVAL, "    return math.pi * r * r\n", 0.0),
        (HUMANEVAL, "    return None\n", 0.0),
        (MBPP, f"```python\n{PAIRS}seen = 0\n```", 0.75),
        (MBPP, "def (", 0.0),
        ({"test_list": ["assert sum(1, 4) == 3"]}, "def sum(a, b): return b - a", 1.0),
        (STDIO, SUM, 1.0),
        (STDIO, "print(7)\nprint(0.75)", 0.5),
        (CALLS, SOLUTION, 1.0),
        (CALLS, "class Solution:\n    def pairs(self, xs): return []", 0.5),
        (CALLS, "", 0.0),
    ],
)
async def test_the_share_of_tests_that_pass(data: dict[str, Any], completion: str, share: float) -> None:
    assert await scored(data, completion) == (float(share == 1.0), share)
    if 0 < share < 1:
        assert await scored(data, completion, reward="fraction") == (share, share)


@needs_bubblewrap
async def test_a_task_without_tests_is_a_fault_of_the_data() -> None:
    with pytest.raises(RewardFailed, match="task t1 has no tests: its data needs `test` and `entry_point`"):
        await scored({"answer": "7"}, "x = 1")


async def test_the_opt_out_runs_programs_without_protection() -> None:
    assert await scored(CALLS, SOLUTION, dangerously_without_sandbox=True) == (1.0, 1.0)


def test_a_node_without_a_sandbox_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    plugin = PluginSettings(use="astraflow_raas.rewards.code_tests:CodeTests")
    with pytest.raises(PluginError, match=r"no bwrap on PATH; install bubblewrap 0\.8 or newer"):
        make(plugin, protocol=Reward, source=RecipeSource())


@needs_bubblewrap
def test_a_sandbox_that_does_not_start_says_why(tmp_path: Any) -> None:
    with pytest.raises(PluginError, match=r"bwrap cannot start .*python: "):
        make(
            PluginSettings.model_validate(
                {
                    "use": "astraflow_raas.rewards.code_tests:CodeTests",
                    "with": {"python": f"{tmp_path}/bin/python"},
                }
            ),
            protocol=Reward,
            source=RecipeSource(),
        )


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_last_fenced_block_is_the_program(completion: str, code: str) -> None:
    assert code_of(completion) == code

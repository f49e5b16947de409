"""Answers that mean the same, answers that do not, and answers that would cost a core for ever."""

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import Reward, RewardFailed, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, make
from astraflow_raas.rewards.math_text import is_costly
from astraflow_raas.rewards.math_verify import MathVerify

DEFAULT = MathVerify()


@pytest.fixture(scope="module", autouse=True)
def nothing_else_to_do() -> Iterator[None]:
    """What other tests left is not collected in the second of an answer."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def graded(gold: str, completion: str, reward: MathVerify = DEFAULT) -> float:
    return reward(TaskSpec("t", (), {"answer": gold}), completion).reward


RIGHT = r"""
18 | 18.0
18 | \$18
1000 | 1,000
12345678 | 12,345,678
-3 | -3.00
0.5 | \frac12
0.5 | \frac{1}{2}
\dfrac{3}{4} | 0.75
\frac34 | \tfrac{3}{4}
1/3 | 0.33333333
50\% | 0.5
50\% | 50%
x=3 | 3
(1,2) | (1, 2)
\left(1,2\right) | (1,2)
\{1,2,3\} | \{3,2,1\}
7! | 5040
2^{10} | 1024
10^{15} | 1000000000000000
3^{2^{3}} | 6561
6\sqrt2 | 6\sqrt{2}
\sqrt{8} | 2\sqrt2
x^2+2x+1 | 1+2x+x^2
\frac \pi4 + 2 - \sqrt2 | 2+\frac{\pi}{4}-\sqrt{2}
\text{Evelyn} | evelyn
Monday | \text{Monday}
52_8 | 52_{8}
52_8 | 52
440\text{ cm}^2 | 440\text{ cm}^2
\frac{1}{2004!} | \frac{1}{2004!}
[2,5) | [2, 5)
"""
# The first sixteen are what math-verify 0.9.0 takes as equal: bases, powers of units, what it misreads or underflows.
WRONG = r"""
52_8 | 52_9
141_{13} | 141_{14}
-221_3 | -221_4
0.0011_{2} | 0.0011_{3}
2112_6 | 2112_7
11010_2 | 11010_3
385_9 | 385_10
443_5 | 443_6
4210_{7} | 4210_{8}
10000_2 | 10000_3
440\text{ cm}^2 | 440\text{ cm}^3
864 \mbox{ inches}^2 | 864 \mbox{ inches}^3
\frac{1}{2004!} | \frac{2}{2004!}
\frac{1}{2004!} | 0
\frac \pi4 + 2 - \sqrt2 | \frac \pi4 + 2 - \sqrt3
\frac \pi4 + 2 - \sqrt2 | \frac \pi5 + 2 - \sqrt2
50 | 50\%
50\% | 50
0.5 | 0.5\%
1/3 | 0.333
18 | 18 dollars
(1,2) | [1,2]
12 | 12 or 13
18 | 19
Monday | Tuesday
x^2+1 | x^2-1
"""
COSTLY = r"""
9^9^9^9
9^{9^{9^9}}
9**9**9**9
100000000!
(10^5)!
3!!!!
99999999^99999999
2^{10\cdot 10\cdot 10\cdot 10\cdot 10\cdot 10\cdot 10}
\sum_{k=1}^{100000000} k
\prod_{k=1}^{10000000} k
\binom{10000000}{5000000}
"""


def rows(table: str) -> list[tuple[str, str]]:
    return [(gold, given) for gold, _, given in (line.partition(" | ") for line in table.split("\n") if line)]


@pytest.mark.parametrize(("gold", "given"), rows(RIGHT))
def test_the_same_in_other_words_is_right(gold: str, given: str) -> None:
    assert graded(gold, rf"so the answer is \boxed{{{given}}}.") == 1.0


@pytest.mark.parametrize(("gold", "given"), rows(WRONG))
def test_another_answer_is_wrong(gold: str, given: str) -> None:
    assert graded(gold, rf"so the answer is \boxed{{{given}}}.") == 0.0


@pytest.mark.parametrize("given", [line for line in COSTLY.split("\n") if line])
def test_a_costly_answer_is_wrong_without_being_computed(given: str) -> None:
    assert is_costly(given)
    spent_s = time.process_time()
    assert graded("5", rf"\boxed{{{given}}}") == 0.0
    assert time.process_time() - spent_s < 0.5


FIRST_ANSWER = r"""
import sys
from astraflow.plugins import TaskSpec
from astraflow_raas.rewards.math_verify import MathVerify

reward = MathVerify()
before = set(sys.modules)
reward(TaskSpec("t", (), {"answer": r"\frac \pi4 + 2 - \sqrt2"}), r"\boxed{\frac \pi4 + 2 - \sqrt3}")
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("sympy")))
"""


def test_the_first_answer_has_its_second_for_itself() -> None:
    """What the package loads on first use is loaded before any answer is timed."""
    ran = subprocess.run([sys.executable, "-c", FIRST_ANSWER], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def for_ever(*_: object, **__: object) -> bool:
    while True:
        try:
            sum(range(1000))
        except Exception:  # noqa: BLE001, S112 - what the package does around its comparisons
            continue


class Burning:
    """Burns CPU time while it is destroyed, where Python drops what a signal handler raises."""

    def __del__(self) -> None:
        end_s = time.process_time() + 0.1
        while time.process_time() < end_s:
            pass


def for_ever_after_a_destructor(*_: object, **__: object) -> bool:
    Burning()
    return for_ever()


@pytest.mark.parametrize("compared", [for_ever, for_ever_after_a_destructor])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_the_filter_lets_pass_has_a_second(
    monkeypatch: pytest.MonkeyPatch, compared: Callable[..., bool]
) -> None:
    monkeypatch.setattr("astraflow_raas.rewards.math_verify._LIMIT_CPU_S", 0.05)
    reward = MathVerify()
    monkeypatch.setattr(reward._library, "verify", compared)
    score = reward(TaskSpec("t", (), {"answer": "x"}), r"\boxed{y}")
    assert (score.reward, score.metrics["math_timeout"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "gold", "completion", "earned"),
    [
        ({"percent": "ignore"}, "50", r"\boxed{50\%}", 1.0),
        ({"percent": "ignore"}, r"50\%", r"\boxed{0.5}", 0.0),
        ({"boxes": "last"}, "7", r"\boxed{1} or \boxed{7}", 1.0),
        ({"boxes": "all"}, "7", r"\boxed{1} or \boxed{7}", 0.0),
        ({"boxes": "all"}, "7", r"\boxed{7}, that is \boxed{7.0}", 1.0),
        ({}, "18", "the answer is 18", 0.0),
        ({"require_box": False}, "18", "the answer is 18", 1.0),
        ({"require_box": False}, "18", "#### 18", 1.0),
        ({"require_box": False}, "18", "no idea", 0.0),
        ({}, "18", r"\boxed{" + "1" * 300 + "}", 0.0),
        ({}, "18", r"\boxed{}", 0.0),
        ({}, "18", "", 0.0),
    ],
)
def test_settings_say_what_counts(
    settings: dict[str, str], gold: str, completion: str, earned: float
) -> None:
    assert graded(gold, completion, MathVerify(**settings)) == earned  # type: ignore[arg-type]


def test_a_task_without_a_readable_answer_is_a_fault_of_the_data() -> None:
    with pytest.raises(RewardFailed, match="has no data"):
        DEFAULT(TaskSpec("t9", (), {}), r"\boxed{1}")


def test_a_node_without_the_package_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    plugin = PluginSettings(use="astraflow_raas.rewards.math_verify:MathVerify")
    with pytest.raises(PluginError, match=r"pip install 'astraflow\[math\]'"):
        make(plugin, protocol=Reward, source=RecipeSource())

"""The agent recipe's task: one split for ever, demonstrations of training numbers only, an answer to judge by."""

import subprocess
import sys
from itertools import islice

from astraflow.plugins import Dataset, Demonstrations
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, make
from support.source_tree import REPOSITORY

SOURCE = RecipeSource(folder=REPOSITORY / "recipes" / "agent-tiny")
SHOWN = 300


def test_no_held_out_number_is_trained_on_or_demonstrated() -> None:
    tasks = make(PluginSettings(use="recipe:Swaps"), protocol=Dataset, source=SOURCE, seed=1)
    show = make(PluginSettings(use="recipe:demonstrations"), protocol=Demonstrations, source=SOURCE)
    trained = {task.messages for index in range(SHOWN) if (task := tasks.train(index))}
    held_out = {task.messages for index in range(SHOWN) if (task := tasks.heldout(index))}
    shown = list(islice(show(1), SHOWN))
    assert not held_out & (trained | {demonstration.messages for demonstration in shown})
    answers = {task.messages: task.data["answer"] for index in range(9999) if (task := tasks.train(index))}
    correct = [d.completion.endswith(f"{{{answers[d.messages]}}}") for d in shown]
    assert 0.5 <= sum(correct) / SHOWN < 0.6


def test_without_its_package_the_agent_names_the_command_that_brings_it() -> None:
    assert SOURCE.folder is not None
    # -S: no site-packages, so no `openai`.
    command = [sys.executable, "-I", "-S", str(SOURCE.folder / "agent.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "agent.py needs a package: No module named 'openai'; run: pip install openai\n"

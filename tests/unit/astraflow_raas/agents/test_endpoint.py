"""The workflow that docs/agents.md shows runs against the endpoint, with the client it names."""

import types

from astraflow.plugins import Message, TaskSpec
from astraflow_raas.grading.scoring import RewardScorer
from support.agents import ScriptedPolicy, serving_agents, trained_text
from support.docs_code import code_of


async def test_the_workflow_on_the_page_makes_one_trajectory_of_its_two_calls() -> None:
    page = types.ModuleType("agents_page")
    exec(compile(code_of("agents.md"), "agents.md", "exec"), vars(page))  # noqa: S102
    policy = ScriptedPolicy(lambda prompt: f"draft {prompt.count('<assistant>')}")
    async with serving_agents() as endpoint:
        workflow = page.Drafts(reward=RewardScorer(lambda _task, said: said == "draft 2"), endpoint=endpoint)
        episode = await workflow.run(TaskSpec("t1", (Message("user", "Write."),)), {"solver": policy})
    (trajectory,) = episode.trajectories
    assert trained_text(trajectory) == ["draft 1¶", "draft 2¶"]
    assert trajectory.reward == 1.0

"""A workflow with all kinds of processes: every second task is an agent's, the others are played in a served
environment."""

import sys
from collections.abc import Mapping
from pathlib import Path

from astraflow.agents import AgentEndpoint
from astraflow.environments import Environments
from astraflow.plugins import Episode, Policy, Scorer, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from astraflow_raas.workflows.multi_turn import MultiTurn, MultiTurnSettings

AGENT = Path(__file__).parent / "asking_agent.py"


class Busy:
    """Made for one policy."""

    def __init__(
        self,
        *,
        reward: Scorer,
        endpoint: AgentEndpoint,
        environments: Environments,
        recipe_dir: Path | None,
        scratch_dir: Path,
    ) -> None:
        agent = AgentProcessSettings(command=(sys.executable, str(AGENT)), timeout_s=60)
        game = MultiTurnSettings(environment=PluginSettings(use="served:Echo"), max_tokens=200)
        self.agent = AgentProcess(
            settings=agent, reward=reward, endpoint=endpoint, recipe_dir=recipe_dir, scratch_dir=scratch_dir
        )
        self.game = MultiTurn(settings=game, environments=environments, reward=reward)

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """By the last letter of the task's name."""
        workflow = self.agent if ord(task.task_id[-1]) % 2 else self.game
        return await workflow.run(task, policies)

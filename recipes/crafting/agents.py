"""Crafting by agents that spawn agents: the world that they share, and the workflow.

Invariant: all agents of an episode share one inventory and one budget of steps; each turn is a trajectory of its own,
and earns 1 if its agent ended with what it was asked for. recipe.py names it to nodes.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow.errors import AstraflowError
from astraflow.plugins import Episode, Message, Policy, TaskSpec, Trajectory, TrajectoryBuilder

RULES = (
    "One action a turn: <info>ITEM</info> shows what ITEM is made of, <get>N ITEM</get> fetches what is basic, "
    "<craft>N ITEM</craft> makes something of your inventory, <inventory></inventory> shows it, <spawn>N ITEM</spawn> "
    "(up to {spawns}) sends an agent with the same inventory to make it, and <finish>MESSAGE</finish> ends your work.\n"
)
Recipes = Mapping[str, Mapping[str, int]]
ACTION = re.compile(r"<(info|get|craft|inventory|spawn|finish)>(.*?)</\1>", re.S)
_AMOUNT = re.compile(r"\s*([1-9]\d{0,2})\s+(\S+)\s*", re.A)


def _amount(text: str) -> tuple[int, str] | None:
    """The number and the item of `2 bak`; None for what says no such thing."""
    found = _AMOUNT.fullmatch(text)
    return (int(found[1]), found[2]) if found else None


@dataclass
class World:
    """What the agents of an episode share."""

    recipes: Recipes
    steps: int = 0
    agents: int = 0
    held: Counter[str] = field(default_factory=Counter)
    makes: Mapping[str, int] = field(default_factory=dict)
    """How many of an item one craft makes, where that is not one."""

    def needs(self, number: int, item: str) -> tuple[dict[str, int], int]:
        """What so many of an item take, and how many of it come out; nothing for what is basic."""
        each, crafts = self.makes.get(item, 1), -(-number // self.makes.get(item, 1))
        return {name: crafts * amount for name, amount in self.recipes.get(item, {}).items()}, crafts * each

    def do(self, kind: str, text: str) -> str:
        """Carry out an action that is neither spawn nor finish; returns what the agent sees."""
        if kind == "inventory":
            held = ", ".join(f"{number} {item}" for item, number in sorted(self.held.items()) if number)
            return held or "nothing"
        if kind == "info":
            needs = self.recipes.get(text.strip(), {})
            basic = {item: "" if item in self.recipes else " basic" for item in needs}
            made = f"{self.makes[text.strip()]} from " if self.makes.get(text.strip(), 1) > 1 else ""
            return (
                made + ", ".join(f"{number} {item}{basic[item]}" for item, number in needs.items()) or "basic"
            )
        if (amount := _amount(text)) is None:
            return "say N ITEM"
        return self._get(*amount) if kind == "get" else self._craft(*amount)

    def _get(self, number: int, item: str) -> str:
        if item in self.recipes or item not in {each for needs in self.recipes.values() for each in needs}:
            return f"{item} is not basic"
        self.held[item] += number
        return f"got {number} {item}"

    def _craft(self, number: int, item: str) -> str:
        needs, made = self.needs(number, item)
        if not needs or any(self.held[each] < each_number for each, each_number in needs.items()):
            return f"cannot craft {item}"
        self.held.subtract(needs)
        self.held[item] += made
        return f"made {made} {item}"


class Crafting:
    """Plays the run's only role, by as many agents as it spawns: at most `max_depth` deep, `max_steps` turns in all."""

    def __init__(
        self,
        *,
        max_steps: int = 40,
        max_depth: int = 3,
        max_spawns: int = 4,
        depth_discount: bool = False,
        rules: str = RULES,
    ) -> None:
        """`depth_discount` divides what an agent earns by 1 + its depth."""
        if not 1 <= max_steps <= 64:
            raise ValueError(
                f"max_steps is {max_steps}; give 1 to 64, as many trajectories as an episode may have"
            )
        self._steps, self._depth, self._spawns = max_steps, max_depth, max_spawns
        self._depth_discount, self._rules = depth_discount, rules.replace("{spawns}", str(max_spawns))

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return a trajectory for each turn of each agent."""
        (policy,) = policies.values()
        world = World(task.data["recipes"], self._steps, makes=task.data.get("makes", {}))
        done = list[Trajectory]()
        await self._agent(world, policy, (1, task.data["goal"]), done=done, depth=0)
        won = float(world.held[task.data["goal"]] > 0)
        metrics = {"turns": float(len(done)), "agents": float(world.agents), "won": won}
        return Episode(tuple(done) if policy.wants_trajectory else (), metrics)

    async def _agent(
        self, world: World, policy: Policy, goal: tuple[int, str], *, done: list[Trajectory], depth: int
    ) -> str:
        """Let an agent work on so many of an item; returns its message, all that its parent sees."""
        number, item = goal
        chat = [Message("user", f"{self._rules}Make {number} {item}.")]
        turns, message = list[TrajectoryBuilder](), None
        world.agents += 1
        while message is None and world.steps > 0:
            world.steps -= 1
            turn = TrajectoryBuilder(policy)
            turn.add_prompt(chat)
            try:
                said = (await turn.generate()).text
            except AstraflowError as error:
                if error.reason != "ENGINE_REFUSED" or not turns:
                    raise
                break  # its chat is longer than the engine's context: what it did so far counts
            turns.append(turn)
            actions = ACTION.findall(said)
            if actions and actions[-1][0] == "finish":
                message = actions[-1][1]
                break
            seen = "no action" if not actions else ""
            if actions and actions[-1][0] == "spawn":
                asked = [_amount(text) for kind, text in actions if kind == "spawn"][: self._spawns]
                wanted = [each for each in asked if each]
                if depth + 1 >= self._depth or len(wanted) < len(asked):
                    seen = "cannot spawn"
                else:
                    said_by = [
                        await self._agent(world, policy, each, done=done, depth=depth + 1) for each in wanted
                    ]
                    seen = "\n".join(said_by)
            elif actions:
                seen = world.do(*actions[-1])
            chat += [Message("assistant", said), Message("user", seen)]
        has_it = message is not None and world.held[item] >= number
        reward = float(has_it) / (1 + depth if self._depth_discount else 1)
        done += [turn.build(reward=reward, metrics={"depth": float(depth)}) for turn in turns]
        return message if message is not None else "ended without an answer"

"""Gymnasium environments with text: what they show as words, and an action from the last word that names one.

Invariant: an answer that names no action is not carried out, costs a turn and says so; seeds come from the task, so
equal tasks start equally. Served or named by a recipe as `astraflow_environment.adapters.gymnasium_text:GymnasiumText`.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.plugins import Message, Observation, TaskSpec

_MARKED = re.compile(r"\x1b\[[\d;]*m(.+?)\x1b\[0m")
"""What a terminal would show in colour; in words it stands in brackets."""


class GymnasiumText:
    """One environment; discrete actions have names or numbers, text spaces take the answer as it is.

    The task may give `seed` and `options`; a text observation is shown as it is, else `render_mode="ansi"` where the
    environment has it, else the observation's own form.
    """

    def __init__(
        self,
        *,
        env_id: str,
        actions: Sequence[str] = (),
        kwargs: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """`actions` name 0, 1, 2 …; `modules` are imported first, because they register `env_id`."""
        import importlib

        import gymnasium

        for module in modules:
            importlib.import_module(module)
        modes = _render_modes(gymnasium, env_id)
        given = {"render_mode": "ansi", **(kwargs or {})} if "ansi" in modes else dict(kwargs or {})
        self._env = gymnasium.make(env_id, **given)
        self._renders = given.get("render_mode") == "ansi"
        space = self._env.action_space
        self._discrete = isinstance(space, gymnasium.spaces.Discrete)
        if not self._discrete and not isinstance(space, gymnasium.spaces.Text):
            raise ValueError(
                f"{env_id} takes {space}; only Discrete and Text actions can be written as words"
            )
        count = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
        if actions and len(actions) != count:
            raise ValueError(f"{env_id} has {count} actions, `actions` names {len(actions)}")
        self._names = [name.lower() for name in actions] or [str(number) for number in range(count)]

    async def reset(self, task: TaskSpec) -> Observation:
        """Begin from the task's seed."""
        seed = task.data.get("seed", zlib.crc32(task.task_id.encode()))
        seen, _ = self._env.reset(seed=int(seed), options=task.data.get("options"))
        listed = f"\nActions: {', '.join(self._names)}" if self._discrete else ""
        return Observation(messages=(Message("user", self._shown(seen) + listed),))

    async def step(self, action: Message) -> Observation:
        """Carry out what the answer names."""
        chosen = self._chosen(action.content)
        if chosen is None:
            hint = f"No action in that. Actions: {', '.join(self._names)}"
            return Observation(messages=(Message("user", hint),), metrics={"invalid": 1.0})
        seen, reward, terminated, truncated, _ = self._env.step(chosen)
        return Observation(
            messages=(Message("user", self._shown(seen)),),
            reward=float(reward),
            done=bool(terminated or truncated),
            metrics={"invalid": 0.0},
        )

    async def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _chosen(self, text: str) -> Any:  # noqa: ANN401 - of a space of another library
        if not self._discrete:
            return text
        words = re.findall("|".join(rf"\b{re.escape(name)}\b" for name in self._names), text.lower())
        return self._names.index(words[-1]) if words else None

    def _shown(self, seen: object) -> str:
        if isinstance(seen, str):
            return seen
        return _MARKED.sub(r"[\1]", str(self._env.render())) if self._renders else str(seen)


def _render_modes(gymnasium: Any, env_id: str) -> Sequence[str]:  # noqa: ANN401 - an optional module
    made = gymnasium.make(env_id)
    made.close()
    modes: Sequence[str] = made.metadata.get("render_modes", ())
    return modes

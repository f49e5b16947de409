"""A game for models that have learnt nothing yet: each player says something once, and who says more wins."""

from astraflow.plugins import Message, Observation, TaskSpec


class LongerWord:
    """Of two moves; the other player sees what was said."""

    async def reset(self, task: TaskSpec) -> Observation:
        """The first player sees the task alone."""
        self.said: list[str] = []
        return Observation()

    async def step(self, action: Message) -> Observation:
        """The second move decides."""
        self.said.append(action.content)
        seen = (Message("user", action.content),)
        if len(self.said) < 2:
            return Observation(messages=seen)
        first, second = map(len, self.said)
        return Observation(
            messages=seen, done=True, metrics={"win": 0.5 if first == second else float(first > second)}
        )

    async def close(self) -> None:
        """Nothing to free."""

"""A game of two players, move by move: self-play, or a policy against past versions of itself.

Invariant: each player has a trajectory of its own, of what it was shown and what it said, tokens in and tokens out; the
game alone decides what a move does and who has won. Named by a recipe as
`astraflow_raas.workflows.two_player:TwoPlayer`; docs/roles.md describes it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from astraflow.environments import EnvironmentFailed, Environments
from astraflow.errors import InvalidArgumentError
from astraflow.plugins import (
    Environment,
    Episode,
    Message,
    Observation,
    Policy,
    TaskSpec,
    Trajectory,
    TrajectoryBuilder,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_raas.workflows.prompts import off_the_loop_if_long

_DRAW = 0.5
WIN = "win"


class TwoPlayerSettings(BaseModel):
    """What a recipe gives under `with`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    game: PluginSettings
    """An `Environment` plug-in, or `served:Name`: a move is a step, which shows the other player what it sees next."""
    roles: tuple[str, str] = ("first", "second")
    """The roles of the two seats; the first begins."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Moves of both players together; then it is a draw."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 4096
    """Tokens of one player's trajectory; who has no room left to move has lost."""
    turn_timeout_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """Seconds the game may take for a reset or a move."""

    @model_validator(mode="after")
    def _two_roles(self) -> "TwoPlayerSettings":
        if self.roles[0] == self.roles[1]:
            raise ValueError(
                f"roles are {self.roles}; give two different ones, which one policy may both play"
            )
        return self


class TwoPlayer:
    """Lets two roles move in turns until the game is over. `roles` are those of the settings."""

    def __init__(self, *, settings: TwoPlayerSettings, environments: Environments) -> None:
        self._settings = settings
        self._make = environments.maker(settings.game, turn_timeout_s=settings.turn_timeout_s)
        self.roles = settings.roles

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the trajectories of the players that want theirs. Nothing is played when nobody does."""
        seats = [_Seat(policies[role], max_tokens=self._settings.max_tokens) for role in self.roles]
        if not any(seat.policy.wants_trajectory for seat in seats):
            return Episode(())
        game = self._make()
        try:
            score, metrics = await self._play(game, task, seats)
        finally:
            await game.close()
        scores = (score, 1.0 - score)
        trained = [s for seat, s in zip(seats, scores, strict=True) if seat.policy.wants_trajectory]
        if len(trained) == 1:
            metrics[WIN] = trained[0]
        metrics |= {"turns": float(sum(seat.num_moves for seat in seats)), "first_win": score}
        played = [seat.trajectory(earned) for seat, earned in zip(seats, scores, strict=True)]
        return Episode(tuple(filter(None, played)), metrics)

    async def _play(
        self, game: Environment, task: TaskSpec, seats: Sequence["_Seat"]
    ) -> tuple[float, dict[str, float]]:
        """What the first seat scored, 1 a win, 0.5 a draw, and the game's own metrics."""
        seen, metrics = await game.reset(task), dict[str, float]()
        for turn in range(self._settings.max_turns):
            seat = seats[turn % 2]
            if not await seat.show((*(() if seat.num_moves else task.messages), *seen.messages)):
                return float(turn % 2), metrics
            seen = await game.step(await seat.move())
            seat.earned(seen.reward)
            metrics = {f"game.{name}": value for name, value in seen.metrics.items() if name != WIN}
            if seen.done:
                return _score(seen), metrics
        return _DRAW, metrics


class _Seat:
    """One player's side of a game."""

    def __init__(self, policy: Policy, *, max_tokens: int) -> None:
        self.policy = policy
        self.num_moves = 0
        self._max_tokens = max_tokens
        self._turns = TrajectoryBuilder(policy)
        self._rewards = 0.0

    async def show(self, messages: Sequence[Message]) -> bool:
        """Add what the player sees before its move; False when that leaves no room for one.

        Raises InvalidArgumentError when even the first does not fit, EnvironmentFailed when there is nothing.
        """
        if not messages:
            raise EnvironmentFailed(
                "the game showed nothing after a move; show the other player what was done"
            )
        if self.num_moves:
            return await off_the_loop_if_long(
                messages, lambda: self._turns.add_messages(messages, max_tokens=self._max_tokens)
            )
        await off_the_loop_if_long(messages, lambda: self._turns.add_prompt(messages))
        num_tokens = len(self._turns.token_ids)
        if num_tokens >= self._max_tokens:
            raise InvalidArgumentError(
                f"the first prompt of role {self.policy.role!r} has {num_tokens} tokens, max_tokens is "
                f"{self._max_tokens}; raise it, or shorten what the game shows"
            )
        return True

    async def move(self) -> Message:
        """Sample the next move."""
        room = self._max_tokens - len(self._turns.token_ids)
        result = await self._turns.generate(max_new_tokens=min(room, self.policy.max_new_tokens))
        self.num_moves += 1
        return Message("assistant", result.text)

    def earned(self, reward: float) -> None:
        """Note what the game gave for the move."""
        self._turns.reward_turn(reward)
        self._rewards += reward

    def trajectory(self, score: float) -> Trajectory | None:
        """What is trained on, if it is wanted and there was a move: it earns the score and the rewards of its moves."""
        if not (self.policy.wants_trajectory and self.num_moves):
            return None
        return self._turns.build(reward=score + self._rewards)


def _score(last: Observation) -> float:
    score = last.metrics.get(WIN, math.nan)
    if not 0.0 <= score <= 1.0:
        raise EnvironmentFailed(
            f"the game is over and its metric {WIN!r} is {score}; give what the first seat scored: 1 won, 0.5 a draw, "
            "0 lost"
        )
    return score

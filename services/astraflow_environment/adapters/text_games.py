"""TextWorld and ALFWorld: real text games, one step a command.

Invariant: a game is found below a folder or in a file that the operator names, never elsewhere; its engine keeps state
in the process, so each worker serves one session. Parts of both packages are under the GPL, hence extras of their own.
Served as `astraflow_environment.adapters.text_games:TextWorld` and `:AlfWorld`.
"""

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astraflow.data.task_files import read_rows
from astraflow.errors import RecipeError
from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec

_ROW = {"id": str, "task": str, "pddl_problem": str}
_FETCH = "pip install 'astraflow[alfworld]' && alfworld-download, then serve ~/.cache/alfworld/json_2.1.1"


class TextWorld:
    """A game made by `tw-make`: the task's `data["game"]` is a file below `games`."""

    package = "textworld"
    """Whose games these are, and the extra that brings it."""

    def __init__(self, *, games: Path, admissible: bool = True, reward: str = "score") -> None:
        """`admissible` lists the possible commands with every observation; `reward` is `score` (its gain, of the
        maximum) or `won`.
        """
        _require(self.package)
        self._games = games
        self._admissible = admissible
        self._reward = reward
        self._score = 0.0
        self._game: Any = None

    async def reset(self, task: TaskSpec) -> Observation:
        """Load the task's game. Raises MissingCapability for one that is not here."""
        self._game = self._load(str(task.data.get("game", "")))
        self._score = 0.0
        return Observation(messages=(self._message(self._game.reset()),))

    async def step(self, action: Message) -> Observation:
        """Enter the last line of the answer as a command."""
        lines = action.content.strip().splitlines() or [""]
        state, _, done = self._game.step(lines[-1].removeprefix("> ").strip())
        won = float(bool(state["won"]))
        gained, self._score = self._earned(state) - self._score, self._earned(state)
        return Observation(
            messages=(self._message(state),),
            reward=gained,
            done=bool(done or state["won"] or state["lost"]),
            metrics={"won": won},
        )

    async def close(self) -> None:
        """Free the game."""
        if self._game is not None:
            self._game.close()

    def _load(self, name: str) -> Any:  # noqa: ANN401 - of another library
        import textworld

        path = (self._games / name).resolve()
        if not path.is_relative_to(self._games.resolve()) or not path.is_file():
            raise MissingCapability(
                f"no game {name!r} below {self._games}; make it with tw-make, or serve its folder"
            )
        return textworld.start(str(path), self._infos())

    def _infos(self) -> Any:  # noqa: ANN401 - of another library
        import textworld

        return textworld.EnvInfos(
            admissible_commands=self._admissible, score=True, max_score=True, won=True, lost=True
        )

    def _earned(self, state: Mapping[str, Any]) -> float:
        if self._reward == "won" or not state.get("max_score"):
            return float(bool(state["won"]))
        return float(state["score"]) / float(state["max_score"])

    def _message(self, state: Mapping[str, Any]) -> Message:
        text = str(state["feedback"]).strip()
        if self._admissible:
            text += "\n\nCommands: " + ", ".join(state["admissible_commands"])
        return Message("user", text)


class AlfWorld(TextWorld):
    """A household task: `games` is a folder as `alfworld-download` makes it, and the task's `data["game"]` a
    `game.tw-pddl` below it; or JSON lines (a file or those of a folder, `.gz` or not) of `id`, `task` and
    `pddl_problem`, and `data["game"]` is an `id`. The reward is 1 when the task is done.
    """

    package = "alfworld"

    def __init__(self, *, games: Path, admissible: bool = True, parse_cache: bool = True) -> None:
        """`parse_cache` remembers parsed grammar, which is most of a step's time. Raises RecipeError where the package,
        or any game, is missing, and with file and line for a malformed row.
        """
        super().__init__(games=games, admissible=admissible, reward="won")
        if parse_cache:
            remember_parses()
        self._rows = _rows(games)

    def _load(self, name: str) -> Any:  # noqa: ANN401 - of another library
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl.pddl import PddlEnv

        game = AlfredDemangler(PddlEnv(self._infos()))
        game.load(self._written(name))
        return game

    def _written(self, name: str) -> Mapping[str, str]:
        """The game as its file says it."""
        if name in self._rows:
            row, (domain, grammar) = self._rows[name], _domain_and_grammar()
            said = grammar.replace("UNKNOWN GOAL", row["task"])
            return {"pddl_domain": domain, "grammar": said, "pddl_problem": row["pddl_problem"]}
        path = (self._games / name).resolve()
        if not path.is_relative_to(self._games.resolve()) or not path.is_file():
            raise MissingCapability(
                f"no game {name!r} in {self._games}, which has {len(self._rows)} in JSON lines; serve where it lies"
            )
        game = json.loads(path.read_text())
        return {name: str(game[name]) for name in ("pddl_domain", "grammar", "pddl_problem")}


@functools.cache
def remember_parses() -> None:
    """Have TextWorld parse each piece of grammar and each condition once in a process."""
    from textworld.envs.pddl import textgen

    parse = functools.lru_cache(maxsize=None)(textgen._parse_and_convert)
    # What is parsed gets a context by its user: each gets its own.
    textgen._parse_and_convert = lambda *given, **named: copy.deepcopy(parse(*given, **named))
    textgen.Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(
        textgen.Rule.parse_conjunctive_query
    )


@functools.cache
def _domain_and_grammar() -> tuple[str, str]:
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    return Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()


@functools.cache
def _rows(games: Path) -> Mapping[str, Mapping[str, str]]:
    files = sorted([*games.glob("*.jsonl"), *games.glob("*.jsonl.gz")]) if games.is_dir() else [games]
    if not files and not any(games.glob("*/*/*/game.tw-pddl")):
        raise RecipeError(f"{games.absolute()} has no game.tw-pddl and no JSON lines: {_FETCH}")
    return {row["id"]: row for file in files for row in read_rows(file, fields=_ROW, remedy=_FETCH)}


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is missing where this environment runs; give it a Python of its own: python -m venv games "
            f"&& games/bin/pip install 'astraflow[environment,{package}]', and serve with games/bin/astraflow"
        ) from error

"""The process of a run's foreign plug-ins, `python -m astraflow_dataflow.runs.foreign.worker DESCRIPTOR`.

It says what it is about to do before it does it, so that whoever waits can name what hangs; then it answers calls, one
after the other. Invariant: whatever a plug-in raises is answered in words; what it
prints goes to standard error. `process` starts it, bounds it and kills it.
"""

import inspect
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.errors import PluginError
from astraflow.plugins import Curator, Dataset, Filter, Measuring, PluginState, Selector, TaskSpec
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow.recipe.plugin_settings import DataPluginSettings, PluginSettings
from astraflow_dataflow.runs.drawing import draw, name_of, training_tasks
from astraflow_dataflow.runs.foreign import messages
from astraflow_dataflow.runs.foreign.frames import Frame, receive, send
from astraflow_dataflow.runs.mixed_dataset import make_dataset, tasks_per_epoch
from astraflow_kit.making import out_of_memory
from astraflow_kit.plugins import RAISED, RecipeSource, describe, make, resolve

PROTOCOLS: Mapping[str, type] = {"filter": Filter, "curator": Curator, "selector": Selector}
_MAX_TEXT = 4000
_MAX_ID = 512
_TASK_BYTES_PER_ANSWER = 4 * 2**20
_NICE = 5


class _Worker:
    """The plug-ins that an order names, made."""

    def __init__(self, order: Mapping[str, Any], *, say: Callable[..., None]) -> None:
        self._order, self._say = order, say
        self._states: dict[tuple[str, str], PluginState] = {}
        self._plugins: dict[tuple[str, str], Any] = {}
        folder = Path(order["folder"]) if order["folder"] else None
        self._source = RecipeSource(name=order["source"], text=order["recipe"], folder=folder)
        self._recipe = parse_recipe(order["recipe"], source=order["source"]).recipe

    def make(self) -> dict[str, Any]:
        """Make them; what the server must know of them. Raises PluginError."""
        per_epoch, facts = self._order["tasks_per_epoch"], dict[str, Any]()
        for kind, name, settings in _named(self._recipe, self._order["plugins"]):
            if kind == "dataset":
                dataset = self._dataset(name)
                per_epoch = tasks_per_epoch(dataset)
                names = {method: name_of(getattr(dataset, method)) for method in ("train", "heldout")}
                facts[kind] = {"tasks_per_epoch": per_epoch, "names": names}
            else:
                facts[f"{kind} {name}"] = self._other(kind, name, settings, per_epoch=per_epoch)
        return facts

    def _dataset(self, name: str) -> Dataset:
        run = self._recipe.run
        for settings in [run.dataset] if run.dataset else [part.dataset for part in run.sources.values()]:
            self._say("dataset", name, f"the import of {settings.use}")
            resolve(settings, protocol=Dataset, source=self._source, offered=("seed",))
        self._say("dataset", name, "its constructor")
        self._plugins["dataset", name] = dataset = make_dataset(self._recipe, self._source)
        return dataset

    def _other(
        self, kind: str, name: str, settings: PluginSettings, *, per_epoch: int | None
    ) -> dict[str, bool]:
        state = PluginState()
        offered = {
            "seed": self._recipe.run.seed,
            "advantages": self._recipe.advantages,
            "tasks_per_epoch": per_epoch,
            "state": state,
        }
        self._say(kind, name, "its import")
        resolve(settings, protocol=PROTOCOLS[kind], source=self._source, offered=offered)
        self._say(kind, name, "its constructor")
        plugin: Any = make(settings, protocol=PROTOCOLS[kind], source=self._source, **offered)
        self._plugins[kind, name] = plugin
        if has_state := "state" in inspect.signature(type(plugin).__init__).parameters:
            self._states[kind, name] = state
        return {"state": has_state, "measures": isinstance(plugin, Measuring)}

    def answer(self, asked: Frame) -> Frame:
        """Make one call."""
        key = asked.head["kind"], asked.head["name"]
        state = self._states.get(key, PluginState())
        if "entries" in asked.head:
            asked, entries = messages.split_entries(asked, "entries")
            state.replace(entries)
        try:
            frame = _CALLS[asked.head["call"]](self._plugins[key], asked)
        except RAISED as error:
            traceback.print_exc()
            text = error.message if isinstance(error, PluginError) else describe(error)
            frame = Frame({"raised": text[:_MAX_TEXT] + self._limit(error)})
        changes = state.changes()
        state.saved()
        return messages.with_entries(frame, "changes", changes)

    def _limit(self, error: BaseException) -> str:
        return out_of_memory(error, self._order["memory_mb"])


def _named(recipe: Recipe, wanted: Sequence[Sequence[Any]]) -> list[tuple[str, str, PluginSettings]]:
    """(kind, name, settings) of the plug-ins that an order names by kind, name and place in the recipe."""
    flow = recipe.dataflow
    several: dict[str, Sequence[DataPluginSettings]] = {
        "filter": flow.filters,
        "curator": flow.curators,
        "selector": [flow.selector] if flow.selector else [],
    }
    nothing = PluginSettings(use="recipe:Dataset")
    return [
        (kind, name, several[kind][place] if kind in several else nothing) for kind, name, place in wanted
    ]


def _draw(dataset: Dataset, asked: Frame) -> Frame:
    """Draw as many tasks as are asked for, or as fit into an answer and half of the time for it: at least one."""
    method, start, count, seconds = (asked.head[name] for name in ("method", "start", "count", "seconds"))
    source = training_tasks(dataset) if method == "train" else dataset.heldout
    parts, ended, num_bytes, began_s = list[bytes](), False, 0, time.monotonic()
    for index in range(start, start + count):
        try:
            specs, ended = draw(source, start=index, count=1)
            parts += messages.tasks_frame(specs).parts
        except PluginError:
            if parts:  # the next draw begins at the fault
                break
            raise
        num_bytes += len(parts[-1]) if specs else 0
        if ended or num_bytes > _TASK_BYTES_PER_ANSWER or time.monotonic() - began_s > seconds / 2:
            break
    return Frame({"ended": ended}, parts)


def _filter(keep: Filter, asked: Frame) -> Frame:
    kept = keep(messages.group_of(asked))
    if kept not in (True, False):
        raise TypeError(f"it returned {type(kept).__name__}, not True or False")
    return Frame({"kept": bool(kept)})


def _measured(learning: Measuring, asked: Frame) -> Frame:
    learning.measured(messages.step_of(asked))
    return Frame({})


def _propose(curator: Curator, asked: Frame) -> Frame:
    tasks = tuple(messages.tasks_of(asked))
    chosen: object = curator.propose(tasks)
    if not isinstance(chosen, Sequence) or not all(isinstance(task, TaskSpec) for task in chosen):
        raise TypeError(f"`propose` returned {type(chosen).__name__}, not a sequence of tasks")
    return Frame({"chosen": [str(task.task_id)[:_MAX_ID] for task in chosen[: len(tasks) + 1]]})


def _observe(curator: Curator, asked: Frame) -> Frame:
    curator.observe(messages.group_of(asked))
    return Frame({})


def _select(selector: Selector, asked: Frame) -> Frame:
    candidates, request = messages.candidates_of(asked)
    answer: object = selector.select(candidates, request)
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise TypeError(f"it returned {type(answer).__name__}, not a sequence of group ids")
    return Frame({"chosen": [str(chosen)[:_MAX_ID] for chosen in answer[: len(candidates) + 1]]})


_CALLS: Mapping[str, Callable[[Any, Frame], Frame]] = {
    "draw": _draw,
    "filter": _filter,
    "measured": _measured,
    "propose": _propose,
    "observe": _observe,
    "select": _select,
}


def _be_bounded(memory_mb: int) -> None:
    """Less memory, less of a processor and an earlier end than the server has, so that it never pays for this."""
    os.nice(_NICE)
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text("1000")
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * 2**20,) * 2)


def main(descriptor: str) -> None:
    """Make the plug-ins of the order that comes first, then answer calls until the server is gone."""
    os.dup2(2, 1)
    sock = socket.socket(fileno=int(descriptor))
    order = receive(sock, is_bounded=False).head
    _be_bounded(order["memory_mb"])

    def say(kind: str, name: str, phase: str) -> None:
        send(sock, Frame({"kind": kind, "name": name, "phase": phase}))

    try:
        worker = _Worker(order, say=say)
        facts = worker.make()
    except PluginError as error:
        text = error.message[:_MAX_TEXT] + out_of_memory(error, order["memory_mb"])
        send(sock, Frame({"refused": text}))
        os._exit(2)
    send(sock, Frame({"ready": facts}))
    while True:
        try:
            asked = receive(sock, is_bounded=False)
        except (EOFError, OSError):
            os._exit(0)  # threads that a plug-in left behind must not keep the process
        send(sock, worker.answer(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])

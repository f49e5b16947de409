"""Lives one run through faults and writes down what was seen: `python -m support.gray.life FOLDER NAME…`.

Started in namespaces of its own by `live`, which returns the rows. Times are of the monotonic clock and only reported.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from astraflow_kit.family import ending_with_us
from support.audit import audit
from support.chaos import ROLES
from support.cli import run
from support.development import RunFiles, dev, finish, wait_for
from support.gray.faults import FAULTS, Fault
from support.gray.ground import Ground
from support.ledger_audit import audit as audit_ledger
from support.source_tree import REPOSITORY

_START_S = 400.0
_NOTICE_S = 60.0
_RECOVER_S = 150.0
_STEPS_AFTER = 2
_LOOK_S = 0.05
_SHOWN = 150
_FOLDER = re.compile(r"/\S*?/run(?=[/ ]|$)")


@dataclass
class Row:
    """What one fault did; None stands for what did not happen, or was not waited for."""

    name: str
    lasted_s: float = 0.0
    why_s: float | None = None
    why_said: str = ""
    lines_s: float | None = None
    lines_said: str = ""
    steps_meanwhile: int = 0
    recovered_s: float | None = None
    restarted: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Expectations that did not hold; empty when all did."""


@dataclass
class Lived:
    """The rows of one loop, and what the audit found after its end."""

    rows: list[Row]
    violations: list[str]
    figures: dict[str, int]


class _Said:
    """What `astraflow why` says, asked again and again, and the launcher's lines; from one moment on."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._began_s = time.monotonic()
        self._lines_from = files.stderr.stat().st_size
        self._answers: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._asking = threading.Thread(target=self._ask)

    @contextmanager
    def listening(self) -> Iterator["_Said"]:
        self._asking.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._asking.join()

    def _ask(self) -> None:
        while not self._ended.wait(0.2):
            ended = run("why", "--data-dir", str(self._files.data_dir), "--seconds", "0")
            self._answers.append((time.monotonic(), ended.output + ended.errors))

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def answer_with(self, words: Iterable[str]) -> tuple[float, str] | None:
        """The first answer with one of these words: after how long, and the line with it."""
        for asked_s, answer in self._answers:
            if line := line_with(words, answer):
                return asked_s - self._began_s, line
        return None

    def last_answer(self) -> str:
        return self._answers[-1][1] if self._answers else ""

    def lines(self) -> str:
        with self._files.stderr.open("rb") as file:
            file.seek(self._lines_from)
            return file.read().decode(errors="replace")


def line_with(words: Iterable[str], text: str) -> str:
    """The first line with one of these words, shortened, without what is of this machine; empty when there is none."""
    for line in text.splitlines():
        if any(word in line for word in words):
            return " ".join(_FOLDER.sub("RUN", _sentence(line)).split())[:_SHOWN]
    return ""


def _sentence(line: str) -> str:
    """What a line of a log says to a person."""
    if not line.startswith("{"):
        return line
    try:
        facts = json.loads(line)
    except ValueError:  # it is being written
        return line
    return next((str(facts[name]) for name in ("doubt", "fault", "message") if name in facts), line)


def live(folder: Path, names: Sequence[str]) -> Lived:
    """Live the named faults one after the other, in one run below `folder`, in namespaces of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([*filter(None, sys.path), str(REPOSITORY / "tests")])
    program = ["unshare", "--mount", "--net", sys.executable, "-m", __name__, str(folder), *names]
    with (folder / "driver.log").open("wb") as log:
        ended = subprocess.run(
            ending_with_us(*program),
            env={**os.environ, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
            check=False,
        )
    assert ended.returncode == 0, (folder / "driver.log").read_text()[-6000:]
    found: dict[str, Any] = json.loads((folder / "lived.json").read_text())
    return Lived([Row(**row) for row in found["rows"]], found["violations"], found["figures"])


class _Life:
    """One run, from its first step to its audit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ground = Ground(folder)
        self._files = self._ground.files

    def meet_all(self, faults: Sequence[Fault]) -> Lived:
        ground = self._ground
        variables = {**ground.variables, "ASTRAFLOW_FAILPOINTS_LOG": str(self._files.hits)}
        arguments = ["--steps", "100000"]
        for fault in faults:
            variables |= fault.variables
            arguments += fault.arguments
        with dev(self._folder, *arguments, variables=variables) as launcher:
            ground.monkey.launcher = launcher
            wait_for(
                lambda: self._files.steps_taken() >= 1 or launcher.poll() is not None,
                what="step 1",
                timeout_s=_START_S,
            )
            rows = [self._meet(fault) for fault in faults]
            ground.monkey.end_in_order()
            summary = finish(launcher, self._folder)
        found = audit(self._folder)
        if summary["conservation_error"]:
            found.violations.append(f"conservation error {summary['conservation_error']}")
        ledger = self._files.data_dir / "work" / "trainer-solver" / "ledger.jsonl"
        audit_ledger(ledger)
        return Lived(rows, found.violations, found.figures)

    def _meet(self, fault: Fault) -> Row:
        row, before = Row(fault.name), self._pids()
        steps, said = self._files.steps_taken(), _Said(self._files)
        with said.listening():
            with fault.done(self._ground):
                self._wait(
                    lambda: self._heard(fault, said, row) and said.elapsed_s() >= fault.lasts_s,
                    _NOTICE_S + fault.lasts_s,
                )
                self._wait(lambda: self._noticed(fault, said, steps), _NOTICE_S)
                row.lasted_s = said.elapsed_s()
                row.steps_meanwhile = self._files.steps_taken() - steps
            self._note(row, fault, said)
            healed_s, steps = time.monotonic(), self._files.steps_taken()
            if self._wait(lambda: self._files.steps_taken() >= steps + _STEPS_AFTER, _RECOVER_S):
                row.recovered_s = time.monotonic() - healed_s
            else:
                row.wrong.append(f"no {_STEPS_AFTER} steps within {_RECOVER_S:g} s of its end")
            if not self._wait(lambda: not line_with(fault.why, said.last_answer()), _RECOVER_S):
                row.wrong.append(f"`why` still says {fault.why}")
        self._ground.monkey.require_running()
        after = self._pids()
        row.restarted = [role for role in ROLES if after.get(role) != before.get(role)]
        if unasked := set(row.restarted) - set(fault.restarts):
            row.wrong.append(f"restarted: {', '.join(sorted(unasked))}")
        sys.stderr.write(f"{json.dumps(asdict(row))}\n")
        return row

    def _heard(self, fault: Fault, said: _Said, row: Row) -> bool:
        """Note when the lines said it first."""
        if row.lines_s is None and line_with(fault.lines, said.lines()):
            row.lines_s = said.elapsed_s()
        return True

    def _noticed(self, fault: Fault, said: _Said, steps: int) -> bool:
        self._ground.monkey.require_running()
        return (
            (not fault.why or said.answer_with(fault.why) is not None)
            and (not fault.lines or bool(line_with(fault.lines, said.lines())))
            and (not fault.goes_on or self._files.steps_taken() >= steps + _STEPS_AFTER)
        )

    def _note(self, row: Row, fault: Fault, said: _Said) -> None:
        if answer := said.answer_with(fault.why):
            row.why_s, row.why_said = answer
        elif fault.why:
            row.wrong.append(f"`why` said none of {fault.why}, but:\n{said.last_answer()}")
        row.lines_said = line_with(fault.lines, said.lines())
        if fault.lines and not row.lines_said:
            row.wrong.append(f"the lines said none of {fault.lines}, but:\n{said.lines()}")
        if fault.goes_on and row.steps_meanwhile < _STEPS_AFTER:
            row.wrong.append(f"{row.steps_meanwhile} steps while it lasted")

    def _pids(self) -> dict[str, int]:
        self._ground.monkey.look()
        return {role: pids[-1] for role, pids in self._ground.monkey.story.pids.items()}

    @staticmethod
    def _wait(holds: Callable[[], bool], for_s: float) -> bool:
        """Look until it holds; False when it did not in time."""
        deadline_s = time.monotonic() + for_s
        while not holds():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True


def main(folder: Path, names: Sequence[str]) -> None:
    """Write what was lived into `lived.json`."""
    faults = [fault for fault in FAULTS if fault.name in names]
    lived = _Life(folder).meet_all(faults)
    (folder / "lived.json").write_text(json.dumps(asdict(lived)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

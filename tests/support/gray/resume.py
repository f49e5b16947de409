"""A run that stops, finds one of its files damaged and is started again by the same command: file after file."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from support.audit import audit
from support.development import RUN_ID, RunFiles, dev, finish
from support.gray.faults import Damage
from support.gray.life import Lived, Row, line_with

_FIRST_STEPS, _STEPS_EACH = 4, 2
PATIENCE_S = 300.0
_LOOK_S = 0.1


class Talk:
    """What the launcher and the daemons write from now on."""

    def __init__(self, files: RunFiles) -> None:
        logs = sorted((files.data_dir / "logs").glob("*.log"))
        self._from = {path: path.stat().st_size for path in (files.stderr, *logs)}

    def text(self) -> str:
        """All of it, the launcher's lines first."""
        found = []
        for path, start in self._from.items():
            with path.open("rb") as file:
                file.seek(start)
                found.append(file.read().decode(errors="replace"))
        return "\n".join(found)

    def complaints(self) -> str:
        """What was logged above the level of information, one line each."""
        lines = [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]
        kept = ("level", "logger", "timestamp", "service")
        return "\n".join(
            " ".join(str(value) for name, value in line.items() if name not in kept)
            for line in lines
            if line.get("level") in ("warning", "error")
        )


class Resumes:
    """One data dir below `folder`, damaged again and again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = RunFiles(folder)
        self._kept = folder / "kept"
        self._steps = _FIRST_STEPS

    def live(self, damages: Sequence[Damage]) -> Lived:
        """Train a little, then damage one file after the other."""
        with dev(self._files.folder, "--steps", str(self._steps)) as launcher:
            finish(launcher, self._files.folder, timeout_s=PATIENCE_S)
        rows = [self._meet(damage) for damage in damages]
        found = audit(self._files.folder)
        return Lived(rows, found.violations, found.figures)

    def _meet(self, damage: Damage) -> Row:
        row, path = Row(damage.name), self._newest(damage.file)
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._files.data_dir, self._kept, symlinks=True)
        whole = path.read_bytes()
        path.chmod(0o644)
        damage.done(path)
        damaged = path.read_bytes()
        self._steps += _STEPS_EACH
        before = self._trained()
        self._resume(damage, row)
        if damage.refused and self._trained() != before:
            row.wrong.append("it was refused, and changed the store or a checkpoint")
        if path.exists() and path.read_bytes() == damaged:
            path.write_bytes(whole)
        if path.is_relative_to(self._files.data_dir / "redis"):  # it writes on after what it could still read
            self._restore("redis")
        if row.wrong:  # the next one finds a data dir that is whole
            self._restore("")
        if damage.refused or row.wrong:
            with dev(self._files.folder, "--steps", str(self._steps)) as launcher:
                finish(launcher, self._files.folder, timeout_s=PATIENCE_S)
        return row

    def _resume(self, damage: Damage, row: Row) -> None:
        files, talk, began_s = self._files, Talk(self._files), time.monotonic()
        taken = files.steps_taken()
        with dev(files.folder, "--steps", str(self._steps)) as launcher:
            while (status := launcher.poll()) is None and time.monotonic() - began_s < PATIENCE_S:
                self._look(damage, row, talk, taken=taken, began_s=began_s)
                time.sleep(_LOOK_S)
        self._look(damage, row, talk, taken=taken, began_s=began_s)
        row.lasted_s = time.monotonic() - began_s
        row.steps_meanwhile = files.steps_taken() - taken
        if damage.said and not row.lines_said:
            row.wrong.append(f"nobody said any of {damage.said}, but:\n{talk.complaints()}")
        if damage.refused is (status == 0):
            row.wrong.append(f"the launch ended with status {status}:\n{talk.text()[:2500]}")

    def _restore(self, part: str) -> None:
        shutil.rmtree(self._files.data_dir / part)
        shutil.copytree(self._kept / part, self._files.data_dir / part, symlinks=True)

    def _look(self, damage: Damage, row: Row, talk: Talk, *, taken: int, began_s: float) -> None:
        if row.recovered_s is None and self._files.steps_taken() > taken:
            row.recovered_s = time.monotonic() - began_s
        if not row.lines_said and (line := line_with(damage.said, talk.text())):
            row.lines_s, row.lines_said = time.monotonic() - began_s, line

    def _newest(self, pattern: str) -> Path:
        return max(self._files.data_dir.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _trained(self) -> dict[str, bytes]:
        data = self._files.data_dir
        roots = [data / "store" / RUN_ID, data / "work" / "trainer-solver" / "checkpoints"]
        return {str(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}

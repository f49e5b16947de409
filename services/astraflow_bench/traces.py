"""What traces cost: whole runs with and without them in turns, their spans received by a collector in this process.

Invariant: `astraflow dev` runs as users run it; what is compared is the CPU time of all its daemons from the end of one
step to the end of another, so neither starting nor the collector counts. On-policy, so that both do the same work.
Called by the command `astraflow bench traces`; tests use the collector.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeAlias
from zlib import crc32

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from astraflow.plugins import TaskSpec
from astraflow_bench.figures import Figure, cpu_seconds
from astraflow_bench.rollout.models import QUICKSTART, SMALL

MODELS = {"quickstart": QUICKSTART, "small": SMALL}
MOST_SHARE = 0.02
"""Holds for `small`: with the quickstart's model an episode costs as little as a few spans."""
_FIRST_STEP = 2
"""Whose end begins the measurement: what is loaded once is loaded."""
_PATIENCE_S = 600.0
_LOOK_EVERY_S = 0.05

Context: TypeAlias = grpc.ServicerContext


@dataclass(frozen=True)
class Received:
    """One span, and the service that recorded it."""

    service: str
    span: trace_pb2.Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver on a free port of loopback, while its block runs; `answer` may block before each answer."""

    def __init__(self, *, answer: Callable[[], None] = lambda: None) -> None:
        self.received: list[Received] = []
        self._answer = answer
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)  # type: ignore[no-untyped-call]
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What makes a daemon send its spans here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url}

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep what a daemon sends."""
        self._answer()
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.received += [Received(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


@dataclass(frozen=True)
class _Measured:
    """CPU seconds of all daemons, and spans received, for some steps."""

    cpu_s: float
    spans: int


def graded_by_text(task: TaskSpec, completion: str) -> float:
    """A reward that an untrained model's answers differ in: a step without a signal would compute nothing."""
    del task
    return crc32(completion.encode()) / 2**32


@dataclass(frozen=True, kw_only=True)
class TracedLoad:
    """What is measured: a recipe with a model of `MODELS`, for some steps in some turns."""

    recipe: Path
    model: str
    steps: int
    turns: int


def measure(load: TracedLoad, *, folder: Path) -> list[Figure]:
    """Return the cost of traces, the least of the turns. Raises TimeoutError for a run that does not get there,
    CalledProcessError for one that ends.
    """
    without, with_traces = list[_Measured](), list[_Measured]()
    with Collector() as collector:
        for turn in range(load.turns):
            # Who comes first changes: a machine warms up, or is busy for a while.
            for traced in (False, True) if turn % 2 == 0 else (True, False):
                place = folder / f"{turn}-{'on' if traced else 'off'}"
                found = _turn(load, collector, traced=traced, folder=place)
                (with_traces if traced else without).append(found)
    return _figures(load, without, with_traces)


def _figures(
    load: TracedLoad, without: Sequence[_Measured], with_traces: Sequence[_Measured]
) -> list[Figure]:
    off_s, on_s = (min(turn.cpu_s for turn in turns) for turns in (without, with_traces))
    spans = sum(turn.spans for turn in with_traces) / len(with_traces)
    cost = f"{load.model}: CPU of all daemons for a step"
    most = MOST_SHARE if load.model == "small" else None
    return [
        Figure(what=cost, subject="traces off", value=off_s / load.steps, unit="CPU-s"),
        Figure(what=cost, subject="traces on", value=on_s / load.steps, unit="CPU-s"),
        Figure(what=f"{load.model}: spans of a step", subject="", value=spans / load.steps, unit="spans"),
        Figure(
            what=f"{load.model}: CPU that traces add",
            subject="",
            value=on_s / off_s - 1,
            unit="of 1",
            most=most,
        ),
    ]


def _turn(load: TracedLoad, collector: Collector, *, traced: bool, folder: Path) -> _Measured:
    with _run(load, collector, traced=traced, folder=folder) as run:
        _wait_for_step(run, folder, _FIRST_STEP)
        began_s, spans_before = cpu_seconds([run.pid]), len(collector.received)
        _wait_for_step(run, folder, _FIRST_STEP + load.steps)
        return _Measured(cpu_seconds([run.pid]) - began_s, len(collector.received) - spans_before)


@contextmanager
def _run(load: TracedLoad, collector: Collector, *, traced: bool, folder: Path) -> Iterator[psutil.Popen]:
    """`astraflow dev` of a recipe; it ends with all of its own when the block does."""
    sizes = asdict(MODELS[load.model]).items()
    settings = [
        *(f"policies.solver.model.architecture.{name}={value}" for name, value in sizes),
        "policies.solver.model.warm_start.steps=1",
        "dataflow.max_staleness=0",
        "raas.reward=astraflow_bench.traces:graded_by_text",
        "dataflow.evaluation.every_versions=0",
        "dataflow.evaluation.final_samples=1",
    ]
    # A few steps more than are measured, so that the run does not end meanwhile.
    words = ["dev", str(load.recipe), "--quiet", "--data-dir", str(folder)]
    words += ["--steps", str(_FIRST_STEP + load.steps + 5)]
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--traces"] if traced else []
    folder.mkdir(parents=True)
    with (folder / "dev.log").open("wb") as output:
        run = psutil.Popen(
            [sys.executable, "-m", "astraflow.cli", *words],
            stdout=output,
            stderr=output,
            env={**os.environ, **collector.environment},
        )
    try:
        yield run
    finally:
        run.terminate()
        try:
            run.wait(timeout=60)
        except psutil.TimeoutExpired:
            run.kill()


def _wait_for_step(run: psutil.Popen, folder: Path, step: int) -> None:
    until_s, metrics = time.monotonic() + _PATIENCE_S, folder / "metrics.jsonl"
    while time.monotonic() < until_s:
        if run.poll() is not None:
            raise subprocess.CalledProcessError(
                run.returncode, run.args, (folder / "dev.log").read_text()[-2000:]
            )
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if any(_step_of(line) >= step for line in lines[-20:]):
            return
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError(f"step {step} did not end within {_PATIENCE_S:g} s; see {folder / 'dev.log'}")


def _step_of(line: str) -> int:
    try:
        found = json.loads(line)
    except ValueError:
        return 0  # it is being written
    return int(found["step"]) if found.get("kind") == "step" else 0

"""What traces cost: whole runs with and without them in turns, their spans received by a collector in this process.

Invariant: `astraflow dev` runs as users run it; what is compared is the CPU time of all its daemons from the end of one
step to the end of another, so neither starting nor the collector counts. On-policy, so that both do the same work.
Two runs differ by more than traces cost, so the spans of a run are counted, too, and what one costs is measured in a
process that does nothing else. Called by the command `astraflow bench traces`; tests use the collector.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Self, TypeAlias
from zlib import crc32

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from astraflow.plugins import TaskSpec
from astraflow_bench.development import development_run
from astraflow_bench.figures import Figure, cpu_seconds
from astraflow_bench.rollout.models import QUICKSTART, SMALL
from astraflow_kit import traces

MODELS = {"quickstart": QUICKSTART, "small": SMALL}
MOST_SHARE = 0.02
_FIRST_STEP = 2
"""Whose end begins the measurement: what is loaded once is loaded."""
_PATIENCE_S = 600.0
_LOOK_EVERY_S = 0.05
_TASKS, _SPANS_OF_TASK = 2_000, 4
"""What a span costs is measured over as many."""

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
    """CPU seconds of all daemons, and what was received, for some steps."""

    cpu_s: float
    received: Sequence[Received]

    @property
    def passed_over(self) -> float:
        """Spans that were not recorded, as far as the tasks that were tell: each had as many."""
        tasks = {one.span.trace_id for one in self.received if one.span.name == "task"}
        return sum(one.span.trace_id in tasks for one in self.received) * (1 / traces.SHARE - 1)


@dataclass(frozen=True)
class _SpanCost:
    """CPU seconds of a span that is recorded and sent, and of one of a task that is not recorded."""

    recorded_s: float
    passed_over_s: float


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
        span = _SpanCost(*(cpu_of_a_span(collector, sampler=f"always_{said}") for said in ("on", "off")))
    return _figures(load, without, with_traces, span)


def _figures(
    load: TracedLoad, without: Sequence[_Measured], with_traces: Sequence[_Measured], span: _SpanCost
) -> list[Figure]:
    off_s, on_s = (min(turn.cpu_s for turn in turns) for turns in (without, with_traces))
    steps = load.steps * load.turns
    recorded = sum(len(turn.received) for turn in with_traces) / steps
    passed_over = sum(turn.passed_over for turn in with_traces) / steps
    added_s = recorded * span.recorded_s + passed_over * span.passed_over_s
    shown = (
        ("CPU of all daemons for a step", "traces off", off_s / load.steps, "CPU-s", None),
        ("CPU of all daemons for a step", "traces on", on_s / load.steps, "CPU-s", None),
        ("spans of a step", "recorded", recorded, "spans", None),
        ("spans of a step", "of tasks that are not", passed_over, "spans", None),
        ("CPU of a span", "recorded and sent", span.recorded_s * 1e6, "µs", None),
        ("CPU of a span", "of a task that is not", span.passed_over_s * 1e6, "µs", None),
        ("CPU that traces add", "by their spans", added_s / (off_s / load.steps), "of 1", MOST_SHARE),
        ("CPU that traces add", "by runs in turns", on_s / off_s - 1, "of 1", None),
    )
    return [
        Figure(what=f"{load.model}: {what}", subject=subject, value=value, unit=unit, most=most)
        for what, subject, value, unit, most in shown
    ]


def cpu_of_a_span(collector: Collector, *, sampler: str) -> float:
    """Return the CPU seconds of a span as nodes make them, its sending included, in a process of its own. Raises
    RuntimeError when not all of them came.
    """
    before = len(collector.received)
    variables = {
        **collector.environment,
        "OTEL_TRACES_SAMPLER": sampler,
        "OTEL_BSP_MAX_QUEUE_SIZE": str(2 * _TASKS * _SPANS_OF_TASK),
    }
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as alone:
        spent_s = alone.submit(_make_spans, variables).result(timeout=_PATIENCE_S)
    came, made = len(collector.received) - before, _TASKS * _SPANS_OF_TASK
    if came != (made if sampler == "always_on" else 0):
        raise RuntimeError(
            f"of {made} spans {came} came with the sampler {sampler}; is the machine very busy?"
        )
    return spent_s / made


def _make_spans(variables: Mapping[str, str]) -> float:
    os.environ.update(variables)
    traces.begin("bench")
    began_s = time.process_time()
    for number in range(_TASKS):
        run, task_id = "0" * 32, f"train-{number}"
        said: dict[str, traces.Value] = {
            "gen_ai.operation.name": "invoke_agent",
            "astraflow.member": number,
            "astraflow.outcome": "kept",
        }
        episode = traces.episode(run, task_id, f"{task_id}.0")
        with (
            traces.span("task", said, at=traces.task(run, task_id)),
            traces.span("episode", said, at=episode),
            traces.span("chat solver", said) as recorded,
        ):
            recorded.set_attributes(said)
        traces.record("push", began_s=time.time(), under=episode, attributes=said)
    traces.end()
    return time.process_time() - began_s


def _turn(load: TracedLoad, collector: Collector, *, traced: bool, folder: Path) -> _Measured:
    with _run(load, collector, traced=traced, folder=folder) as run:
        _wait_for_step(run, folder, _FIRST_STEP)
        began_s, spans_before = cpu_seconds([run.pid]), len(collector.received)
        _wait_for_step(run, folder, _FIRST_STEP + load.steps)
        return _Measured(cpu_seconds([run.pid]) - began_s, collector.received[spans_before:])


def _run(
    load: TracedLoad, collector: Collector, *, traced: bool, folder: Path
) -> AbstractContextManager[psutil.Popen]:
    sizes = asdict(MODELS[load.model]).items()
    settings = [
        *(f"policies.solver.model.architecture.{name}={value}" for name, value in sizes),
        "policies.solver.model.warm_start.steps=1",
        "dataflow.max_staleness=0",
        f"raas.reward={__name__}:{graded_by_text.__name__}",
        "dataflow.evaluation.every_versions=0",
        "dataflow.evaluation.final_samples=1",
    ]
    # A few steps more than are measured, so that the run does not end meanwhile.
    options = ["--steps", str(_FIRST_STEP + load.steps + 5), *(["--traces"] if traced else [])]
    return development_run(
        load.recipe, settings, folder=folder, environment=collector.environment, options=options
    )


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

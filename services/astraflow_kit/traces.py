"""Traces: how long the parts of a task and of a step took, across daemons, as spans of OpenTelemetry.

Invariant: off unless a setting says otherwise, and then nothing of OpenTelemetry is imported; a collector that is down,
slow or silent costs spans, never the daemon's time: spans wait in a bounded queue for a thread of their own, and the
end of a process waits for them no longer than `_END_S`. The trace of a task is computed from its run and its id, so
every daemon knows it and whether it is recorded, also after a restart; what became of a task is what `astraflow trace`
says. `lifecycle` begins and ends it; daemons use `span`, `record` and the places.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from astraflow_kit.settings import SettingsError, otel_variable

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
    from opentelemetry.trace import Span as RecordedSpan
    from opentelemetry.trace import SpanContext, Tracer

Value: TypeAlias = "str | bool | int | float | Sequence[str]"
Attributes: TypeAlias = Mapping[str, Value]
Place: TypeAlias = "SpanContext"
"""A span by its ids, wherever it is recorded, if it is."""

SHARE = 0.1
"""Share of the tasks that are recorded unless `OTEL_TRACES_SAMPLER` says otherwise; steps are few, and all are."""
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_END_S = 2.0
_given: ContextVar[Place | None] = ContextVar("astraflow_given_place", default=None)
"""The ids of the span that is being made, where they are computed."""


class Span:
    """What a block says about itself: the part of OpenTelemetry's span that is used, keeping nothing."""

    def is_recording(self) -> bool:
        """Whether anything that is said is kept."""
        return False

    def set_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""

    def add_link(self, context: Place) -> None:
        """Name a span of another trace that this one goes on from."""


_NOT_RECORDED = nullcontext(Span())


class _Exporting(NamedTuple):
    provider: TracerProvider
    tracer: Tracer


_exporting: _Exporting | None = None


def begin(service: str) -> None:
    """Record spans from now on, and export them as the variables `OTEL_*` say. Raises SettingsError."""
    global _exporting
    protocol = otel_variable(*_PROTOCOLS) or "grpc"
    if protocol not in _EXPORTERS:
        raise SettingsError(
            f"{_PROTOCOLS[1]} = {protocol!r} is not known; use one of {', '.join(_EXPORTERS)}"
        )
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        exporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"traces need {error.name}, which is not installed; pip install 'astraflow[traces]', or leave --traces out"
        ) from error

    class Ids(RandomIdGenerator):
        def generate_span_id(self) -> int:
            given = _given.get()
            return given.span_id if given else super().generate_span_id()

        def generate_trace_id(self) -> int:
            given = _given.get()
            return given.trace_id if given else super().generate_trace_id()

    names = {
        "service.namespace": "astraflow",
        "service.name": f"astraflow-{service}",
        "service.instance.id": f"{platform.node()}-{os.getpid()}",
    }
    provider = TracerProvider(
        sampler=None if otel_variable("OTEL_TRACES_SAMPLER") else _some_tasks(),
        resource=Resource.create(names),
        id_generator=Ids(),
        shutdown_on_exit=False,  # it would wait for the collector
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # Not set as the provider of the process: FastAPI would record every probe and scrape.
    _exporting = _Exporting(provider, provider.get_tracer("astraflow"))


def end() -> None:
    """Export what is left for a moment, and record nothing more. Idempotent."""
    global _exporting
    exporting, _exporting = _exporting, None
    if exporting is not None:
        last = threading.Thread(target=exporting.provider.shutdown, name="traces", daemon=True)
        last.start()
        last.join(_END_S)


def task(run: str, task_id: str) -> Place | None:
    """The root of a task's trace; None without traces. `run` is the identity of its run."""
    if _exporting is None:
        return None
    from opentelemetry.sdk.trace.sampling import Decision

    digest = hashlib.blake2b(f"{run}/{task_id}".encode(), digest_size=24).digest()
    trace_id = int.from_bytes(digest[:16]) or 1
    decision = _exporting.provider.sampler.should_sample(None, trace_id, "task").decision
    return _place(trace_id, digest[16:], is_sampled=decision is not Decision.DROP)


def episode(run: str, task_id: str, episode_id: str) -> Place | None:
    """The span of an episode in the trace of its task; None without traces."""
    root = task(run, task_id)
    if root is None:
        return None
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8).digest()
    return _place(root.trace_id, digest, is_sampled=root.trace_flags.sampled)


def here() -> Place | None:
    """The span that this code runs in; None outside one, and without traces."""
    if _exporting is None:
        return None
    from opentelemetry.trace import get_current_span

    place = get_current_span().get_span_context()
    return place if place.is_valid else None


def place_of(header: str) -> Place | None:
    """What a caller's header `traceparent` says; None for one that says nothing valid, and without traces."""
    if _exporting is None or not header:
        return None
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    place = get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": header})
    ).get_span_context()
    return place if place.is_valid else None


def header() -> str:
    """The header `traceparent` that continues the trace from here; empty outside a span, and without traces."""
    carrier: dict[str, str] = {}
    if _exporting is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def span(
    name: str,
    attributes: Attributes | None = None,
    *,
    at: Place | None = None,
    under: Place | None = None,
    links: Sequence[Place] = (),
) -> AbstractContextManager[Span]:
    """Record the block: as `at` where its ids are computed; below `under`, or the span that it runs in."""
    if _exporting is None:
        return _NOT_RECORDED
    known = at or under
    place = known or here()
    if place is None or place.trace_flags.sampled:
        return _inside(_started(name, attributes, at=at, under=under, links=links))
    from opentelemetry.trace import NonRecordingSpan

    # What runs inside must know that nothing of this trace is recorded, unless something outside told it.
    return _NOT_RECORDED if known is None else _inside(NonRecordingSpan(place))


def record(
    name: str, *, began_s: float, under: Place | None, attributes: Attributes, links: Sequence[Place] = ()
) -> None:
    """Record what began at `began_s`, by `time.time`, and ends now. Does nothing without traces."""
    if _exporting is not None and under is not None and under.trace_flags.sampled:
        _started(name, attributes, under=under, links=links, began_s=began_s).end()


def served(rpc: str, header: str) -> AbstractContextManager[Span]:
    """Record the answer to a call whose caller sent a `traceparent`; others are not recorded."""
    caller = place_of(header)
    return _NOT_RECORDED if caller is None else span(rpc.lstrip("/"), {"rpc.system": "grpc"}, under=caller)


@contextmanager
def _inside(made: RecordedSpan) -> Iterator[Span]:
    from opentelemetry.trace import StatusCode, use_span

    # Texts of errors may hold what a policy said, or what a tool was given.
    with use_span(made, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield cast("Span", made)
        except BaseException as error:
            made.set_status(StatusCode.ERROR)
            made.set_attribute("error.type", type(error).__qualname__)
            raise


def _some_tasks() -> Sampler:
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased

    class SomeTasks(TraceIdRatioBased):
        def should_sample(
            self, parent_context: Context | None, trace_id: int, name: str, *rest: object, **more: object
        ) -> SamplingResult:
            decide = super().should_sample if name == "task" else ALWAYS_ON.should_sample
            return decide(parent_context, trace_id, name, *rest, **more)  # type: ignore[arg-type]

    return ParentBased(SomeTasks(SHARE))


def _place(trace_id: int, span_id: bytes, *, is_sampled: bool) -> Place:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id, int.from_bytes(span_id) or 1, is_remote=True, trace_flags=flags)


def _started(
    name: str,
    attributes: Attributes | None,
    *,
    at: Place | None = None,
    under: Place | None,
    links: Sequence[Place],
    began_s: float | None = None,
) -> RecordedSpan:
    from opentelemetry.trace import Link, NonRecordingSpan, set_span_in_context

    assert _exporting is not None
    before = _given.set(at)
    try:
        return _exporting.tracer.start_span(
            name,
            context=set_span_in_context(NonRecordingSpan(under)) if under else None,
            attributes=attributes,
            links=[Link(link) for link in links],
            start_time=int(began_s * 1e9) if began_s is not None else None,
        )
    finally:
        _given.reset(before)

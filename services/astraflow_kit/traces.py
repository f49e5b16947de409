"""Traces: how long the parts of a task and of a step took, across daemons, as spans of OpenTelemetry.

Invariant: off unless a setting says otherwise, and then nothing of OpenTelemetry is imported; a collector that is down,
slow or silent costs spans, never the daemon's time: spans wait in a bounded queue for a thread of their own, and the
end of a process waits for them no longer than `_END_S`. The trace of a task is computed from its run and its id, so
every daemon knows it, also after a restart; what became of a task is what `astraflow trace` says.
`lifecycle` begins and ends it; daemons use `span`, `record` and the places.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Self, TypeAlias

from astraflow_kit.settings import SettingsError, otlp_protocol

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as RecordedSpan
    from opentelemetry.trace import SpanContext, Tracer

Value: TypeAlias = "str | bool | int | float | Sequence[str]"
Attributes: TypeAlias = Mapping[str, Value]

_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_END_S = 2.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_given: ContextVar[Place | None] = ContextVar("astraflow_given_place", default=None)
"""The ids of the span that is being made, where they are computed."""


@dataclass(frozen=True)
class Place:
    """A span by its ids, wherever it is recorded: what W3C's header `traceparent` says."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @classmethod
    def of(cls, header: str) -> Self | None:
        """What a caller's header says; None for one that says nothing valid."""
        found = _TRACEPARENT.fullmatch(header)
        if found is None or header.startswith("ff"):
            return None
        place = cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
        return place if place.trace_id and place.span_id else None

    @property
    def header(self) -> str:
        """The header that continues the trace from here."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


class Span:
    """What a block says about itself; without traces it keeps nothing."""

    def __init__(self, recorded: RecordedSpan | None = None) -> None:
        self._recorded = recorded

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        if self._recorded is not None:
            self._recorded.set_attributes(attributes)

    def link(self, places: Sequence[Place]) -> None:
        """Name spans of other traces that this one goes on from."""
        if self._recorded is not None:
            for place in places:
                self._recorded.add_link(_context(place))


_NOT_RECORDED = nullcontext(Span())


class _Block:
    """A span that what runs inside is below of. Not a generator: every call of a model opens one."""

    def __init__(self, made: RecordedSpan) -> None:
        self._made = made

    def __enter__(self) -> Span:
        from opentelemetry.context import attach
        from opentelemetry.trace import set_span_in_context

        self._token = attach(set_span_in_context(self._made))
        return Span(self._made)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from opentelemetry.context import detach
        from opentelemetry.trace import Status, StatusCode

        detach(self._token)
        if kind is not None:
            # Texts of errors may hold what a policy said, or what a tool was given.
            self._made.set_status(Status(StatusCode.ERROR))
            self._made.set_attribute("error.type", kind.__qualname__)
        self._made.end()


@dataclass(frozen=True)
class _Exporting:
    provider: TracerProvider
    tracer: Tracer


_exporting: _Exporting | None = None


def begin(service: str, *, instance: str = "") -> None:
    """Record spans from now on, and export them as the variables `OTEL_*` say. Raises SettingsError."""
    global _exporting
    protocol = otlp_protocol(_EXPORTERS)
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

    names = {"service.namespace": "astraflow", "service.name": f"astraflow-{service}"}
    names |= {"service.instance.id": instance} if instance else {}
    # At exit it would wait for the collector.
    provider = TracerProvider(resource=Resource.create(names), id_generator=Ids(), shutdown_on_exit=False)
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
    trace_id, span_id = int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1
    decision = _exporting.provider.sampler.should_sample(None, trace_id, "task").decision
    return Place(trace_id, span_id, decision is not Decision.DROP)


def episode(run: str, task_id: str, episode_id: str) -> Place | None:
    """The span of an episode in the trace of its task; None without traces."""
    root = task(run, task_id)
    if root is None:
        return None
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8).digest()
    return Place(root.trace_id, int.from_bytes(digest) or 1, root.is_sampled)


def here() -> Place | None:
    """The span that this code runs in; None outside one, and without traces."""
    if _exporting is None:
        return None
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return Place(context.trace_id, context.span_id, context.trace_flags.sampled)


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
    return _Block(_started(name, attributes, at=at, under=under, links=links))


def record(
    name: str, *, began_s: float, under: Place | None, attributes: Attributes, links: Sequence[Place] = ()
) -> None:
    """Record what began at `began_s`, by `time.time`, and ends now. Does nothing without traces."""
    if _exporting is not None and under is not None:
        _started(name, attributes, under=under, links=links, began_s=began_s).end()


def served(rpc: str, header: str) -> AbstractContextManager[Span]:
    """Record the answer to a call whose caller sent a `traceparent`; others are not recorded."""
    caller = Place.of(header) if _exporting is not None and header else None
    return _NOT_RECORDED if caller is None else span(rpc.lstrip("/"), {"rpc.system": "grpc"}, under=caller)


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
            context=set_span_in_context(NonRecordingSpan(_context(under))) if under else None,
            attributes=attributes,
            links=[Link(_context(link)) for link in links],
            start_time=int(began_s * 1e9) if began_s is not None else None,
        )
    finally:
        _given.reset(before)


def _context(place: Place) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        place.trace_id, place.span_id, is_remote=True, trace_flags=TraceFlags(place.is_sampled)
    )

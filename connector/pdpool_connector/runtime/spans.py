"""A span of OpenTelemetry for each hand-off on each side, if a collector is configured; otherwise nothing at all.

Spans go to the tracer provider that the engine has set up. Without one they go to the OTLP endpoint of the variable
`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, if the extra `otel` is installed. The spans of
both sides share the trace of the request's `traceparent` header where the engine passes it on. In any case both carry
`pdpool.room` and `pdpool.attempt`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from pdpool_connector.installed import install_command
from pdpool_connector.protocol.status import TransferStatus
from pdpool_connector.runtime.transfer import Transfer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Spans:
    """Begins and ends the spans of one connector. `owned`: the provider to shut down with it, if it is its own."""

    def __init__(self, tracer: Tracer, role: str, rank: int, owned: TracerProvider | None = None) -> None:
        from opentelemetry.trace import StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._role, self._rank, self._owned = tracer, role, rank, owned
        self._error = StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()
        self._live: dict[Transfer, Span] = {}

    def begin(self, transfer: Transfer, traceparent: str | None) -> None:
        """A hand-off is opened. `traceparent`: that header of the request (W3C Trace Context); a bad one is ignored."""
        context = self._propagator.extract({"traceparent": traceparent}) if traceparent is not None else None
        attributes: dict[str, AttributeValue] = {
            "pdpool.room": transfer.room,
            "pdpool.request_id": transfer.request_id,
            "pdpool.role": self._role,
            "pdpool.rank": self._rank,
        }
        self._live[transfer] = self._tracer.start_span(f"pdpool {self._role} hand-off", context, attributes=attributes)

    def end(self, transfer: Transfer, status: TransferStatus) -> None:
        """It has ended, for its engine; pages may still be kept back."""
        span = self._live.pop(transfer, None)
        if span is None:
            return
        span.set_attribute("pdpool.attempt", ",".join(map(str, transfer.attempts)))
        span.set_attribute("pdpool.bytes", status.bytes_moved)
        if status.cause is not None:
            span.set_attribute("pdpool.cause", status.cause.value)
            span.set_attribute("pdpool.releasable", status.releasable)
            span.set_status(self._error, f"{status.cause.value}: {status.message}")
        span.end()

    def close(self, timeout_s: float) -> None:
        """Send the spans that have not been sent, within `timeout_s`."""
        if self._owned is not None:
            self._owned.force_flush(round(timeout_s * 1000))
            self._owned.shutdown()


def open_spans(role: str, rank: int) -> Spans | None:
    """Where this process's spans go; None when no collector is configured."""
    wanted = any(os.environ.get(name) for name in ENDPOINTS)
    if not wanted and "opentelemetry.sdk.trace" not in sys.modules:
        return None  # there is no provider either, and importing the package takes 0.1 s
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        if isinstance(provider := trace.get_tracer_provider(), TracerProvider):
            return Spans(provider.get_tracer("pdpool"), role, rank)
        if not wanted:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        if wanted:
            log.warning("no spans: %s is not installed; install it with: %s", error.name, install_command("otel"))
        return None
    own = TracerProvider(resource=Resource.create({"service.name": f"pdpool-{role}"}))
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(own.get_tracer("pdpool"), role, rank, own)

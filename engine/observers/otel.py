"""The logger `otel`: spans of a run for OpenTelemetry, sent by OTLP over HTTP.

    bamboo.run        the run, a child of TRACEPARENT in the environment
      bamboo.steps      a group of steps without a recovery, of ten seconds or more
      bamboo.recovery   a recovery, with a child for each phase

Rules: the packages of OpenTelemetry themselves read ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME`` and so on.
Times are those of the records. The span of the run is sent at its end, so a killed run has only those below it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.job.job import Job
from engine.observers.loggers import RecoveryDone, StepDone, TrainingDone

_GROUP_S = 10.0


class OtelLogger:
    """Sends the spans in the background; a collector that does not answer costs spans, not time of the run."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._run: Any = None
        self._context: Any = None  # of the run's span, in which the others stand
        self._group: list[StepDone] = []

    def start(self, job: Job, folder: Path) -> None:
        """Begins the span of the run."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "bamboo"}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        carrier = {name.lower(): os.environ[name] for name in ("TRACEPARENT", "TRACESTATE") if name in os.environ}
        facts = {"run": folder.name, "model": job.model, "stages": job.stages, "pipelines": job.pipelines}
        self._run = self._provider.get_tracer("bamboo").start_span(
            "bamboo.run", TraceContextTextMapPropagator().extract(carrier), attributes=_named(facts)
        )
        self._context = set_span_in_context(self._run)

    def step(self, done: StepDone) -> None:
        """Adds a step to its group; one that ended a recovery begins a group after itself."""
        if done.recoveries:
            self._close()
            return
        self._group.append(done)
        if done.at_s - _begin_s(self._group[0]) >= _GROUP_S:
            self._close()

    def recovery(self, done: RecoveryDone) -> None:
        """Sends the span of a recovery, and those of its phases."""
        from opentelemetry.trace import set_span_in_context

        self._close()
        if not done.phases:
            return
        workers = ",".join(map(str, done.workers))
        facts = {"step": done.step, "workers": workers, "source": done.rung, "lost_steps": done.lost_steps}
        facts |= {"text": done.text} | ({} if done.stall_ms is None else {"stall_ms": done.stall_ms})
        first, last = done.phases[0], done.phases[-1]
        span = self._span("bamboo.recovery", first.begin_s, last.end_s, facts)
        for phase in done.phases:
            self._span(f"bamboo.{phase.name}", phase.begin_s, phase.end_s, {}, set_span_in_context(span))

    def finish(self, done: TrainingDone) -> None:
        """Ends the span of the run, and waits until all are sent."""
        from opentelemetry.trace import StatusCode

        self._close()
        self._run.set_attributes(_named({"outcome": done.outcome, "exit_code": done.exit_code, "steps": done.steps}))
        self._run.set_status(StatusCode.ERROR if done.exit_code else StatusCode.OK, done.error or None)
        self._run.end(_ns(done.at_s))
        self._provider.shutdown()

    def _close(self) -> None:
        if group := self._group:
            self._group = []
            facts = {"first": group[0].step, "last": group[-1].step, "loss": group[-1].loss}
            facts["samples"] = sum(each.samples for each in group)
            self._span("bamboo.steps", _begin_s(group[0]), group[-1].at_s, facts)

    def _span(self, name: str, begin_s: float, end_s: float, facts: Mapping[str, Any], within: Any = None) -> Any:
        tracer = self._provider.get_tracer("bamboo")
        span = tracer.start_span(name, within or self._context, attributes=_named(facts), start_time=_ns(begin_s))
        span.end(_ns(end_s))
        return span


def _begin_s(done: StepDone) -> float:
    return done.at_s - done.seconds


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _named(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"bamboo.{name}": value for name, value in facts.items()}

"""Prometheus, OpenTelemetry and Kubeflow get the figures of a run with a death; each is read as its own users do."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.observers import kubeflow
from engine.observers.loggers import TrainingDone
from engine.observers.observers import LoggerFeed, made_logger
from tests.core.made_records import lines_of, made

S = 10**9
JOB = made("job").job


def commit(step: int, at_s: float, *, last: bool = False) -> dict[str, Any]:
    at_ns = int(at_s * S)
    return {"event": "commit", "step": step, "at_ns": at_ns, "loss": 3.0 - step / 4, "grad_norm": 0.5, "last": last}


# Two workers with a stage each; worker 1 dies in step 3, a stall of three seconds, and heals in step 4.
_EPOCH = {"event": "epoch", "epoch": 1, "at_ns": 0, "verdict": (), "members": [0, 1], "owners": [0, 1]}
_OUT = {"event": "epoch", "epoch": 2, "at_ns": int(4.6 * S), "members": [0, 2], "owners": [0, 0]}
EVENTS: list[dict[str, Any]] = [
    {"event": "job", "stages": 2, "steps": 6, "pipelines": 1, "blocks": 1},
    _EPOCH | {"shadows": [[1], [0]]},
    {"event": "go", "epoch": 1, "at_ns": S},
    *(commit(step, step + 2) for step in range(3)),
    {"event": "exit", "of": 1, "expected": False, "at_ns": int(4.5 * S), "seen_ns": int(4.5 * S)},
    _OUT | {"verdict": [[1, "was killed (SIGKILL)", "death", None, None]], "shadows": [[2], []]},
    {"event": "mark", "phase": "fence", "epoch": 2, "worker": 0, "at_ns": int(4.7 * S)},
    {"event": "go", "epoch": 2, "at_ns": 5 * S},
    commit(3, 8),
    {"event": "moved", "program": "heal", "epoch": 2, "step": 4, "at_ns": int(8.5 * S)},
    commit(4, 9),
    commit(5, 10, last=True),
    {"event": "training_ended", "outcome": "finished", "exit_code": 0, "at_ns": int(10.5 * S)},
]


def fed(logger: object, folder: Path, events: list[dict[str, Any]] = EVENTS) -> LoggerFeed:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text(lines_of(events))
    feed = LoggerFeed(logger, folder / "events.jsonl")
    feed.read_on()
    return feed


@contextmanager
def receiver() -> Iterator[tuple[str, list[tuple[Any, bytes]]]]:
    """Yields the address of a server, and the headers and bodies that were posted to it."""
    posted: list[tuple[Any, bytes]] = []

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.headers, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", posted
        server.shutdown()


def samples(text: str) -> dict[str, float]:
    """Returns the samples of a page by name and labels but that of the run; every line is one that a scraper reads."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'bamboo_([a-z_]+)\{run="run"(?:,([^}]*))?\} ([-+.\deNaInf]+)', line)
            assert match, line
            assert f"# TYPE bamboo_{match[1]} " in text and f"# HELP bamboo_{match[1]} " in text
            found[match[1] + (f" {match[2]}" if match[2] else "")] = float(match[3])
    return found


def test_prometheus_has_stalls_by_culprit_and_phase_cover_and_goodput(tmp_path: Path) -> None:
    fed(made_logger("prometheus"), tmp_path / "run")
    found = samples((tmp_path / "run" / "metrics.prom").read_text())
    assert found["steps_total"] == 6 and found["step"] == 5 and found["planned_steps"] == 6 and found["loss"] == 1.75
    assert found['recoveries_total culprit="1",source="shadow"'] == 1
    assert found['stall_seconds_total culprit="1"'] == pytest.approx(3.0)
    phases = {key.split('"')[3]: value for key, value in found.items() if key.startswith("recovery_seconds_total")}
    assert phases == pytest.approx({"agree": 0.1, "fence": 0.1, "plan": 0.3, "replay": 0.0, "merged": 3.0}, abs=1e-3)
    assert found["goodput_ratio"] == pytest.approx(6 / 9)
    assert found["exit_code"] == found["replicas_differ"] == found["uncovered_stages"] == 0


def test_prometheus_names_what_is_uncovered_until_it_is_healed_and_replicas_that_differ(tmp_path: Path) -> None:
    events = EVENTS[:11]  # to the commit that ended the recovery
    logger: Any = made_logger("prometheus")
    fed(logger, tmp_path / "run", events)
    assert samples(logger.text)["uncovered_stages"] == 1
    logger.finish(TrainingDone("failed", 70, 4, "", 0.0))
    ended = {"event": "training_ended", "outcome": "failed", "exit_code": 70, "at_ns": 9 * S}
    failed = {"event": "failed", "error": "step 3: layer 1 differs", "notice": "replicas-differ", "at_ns": 9 * S}
    fed(again := made_logger("prometheus"), tmp_path / "run", [*events, failed, ended])
    found = samples((tmp_path / "run" / "metrics.prom").read_text())
    assert found["replicas_differ"] == 1 and found["exit_code"] == 70 and again is not logger


def test_prometheus_answers_on_its_port_and_on_no_other_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1: Address already in use; name another one"):
            fed(made_logger(f"prometheus:{port}"), tmp_path / "run", EVENTS[:4])
    logger: Any = made_logger(f"prometheus:{port}")
    fed(logger, tmp_path / "run", EVENTS[:4])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert samples(answer.read().decode())["step"] == 0
    assert logger._server.server_address[0] == "127.0.0.1"
    logger.finish(TrainingDone("finished", 0, 1, "", 0.0))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_prometheus_tells_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    logger: Any = made_logger(f"prometheus:{tmp_path}/nowhere/a.prom")
    with pytest.raises(Exception, match="cannot write"):
        fed(logger, tmp_path / "run")


def test_otel_sends_a_span_per_recovery_phase_and_group_below_the_traceparent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'bamboo-train[otel]'")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("TRACEPARENT", f"00-{'ab' * 16}-{'cd' * 8}-01")
    with receiver() as (address, posted):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
        fed(made_logger("otel"), tmp_path / "run")
    requests = [ExportTraceServiceRequest.FromString(body) for _, body in posted]
    scopes = [scope for each in requests for of in each.resource_spans for scope in of.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    (run,) = [span for span in spans if span.name == "bamboo.run"]
    assert run.parent_span_id == b"\xcd" * 8 and {span.trace_id for span in spans} == {b"\xab" * 16}
    (recovery,) = [span for span in spans if span.name == "bamboo.recovery"]
    attributes = {each.key: each.value for each in recovery.attributes}
    assert attributes["bamboo.workers"].string_value == "1"
    assert attributes["bamboo.stall_ms"].double_value == pytest.approx(3000)
    phases = [span for span in spans if span.parent_span_id == recovery.span_id]
    assert [span.name.removeprefix("bamboo.") for span in phases] == ["agree", "fence", "plan", "replay", "merged"]
    assert phases[0].start_time_unix_nano == recovery.start_time_unix_nano
    for before, after in pairwise(phases):
        assert abs(after.start_time_unix_nano - before.end_time_unix_nano) < S // 1000
    assert (recovery.end_time_unix_nano - recovery.start_time_unix_nano) / S == pytest.approx(3.5, abs=0.01)
    groups = [span for span in spans if span.name == "bamboo.steps"]
    facts = [{each.key: each.value.int_value for each in span.attributes} for span in groups]
    assert [(each["bamboo.first"], each["bamboo.last"]) for each in facts] == [(0, 2), (4, 5)]
    assert {span.parent_span_id for span in (*groups, recovery)} == {run.span_id}


def test_kubeflow_gets_the_fields_of_a_trainer_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret\n")
    with receiver() as (address, posted):
        monkeypatch.setenv(kubeflow.URL, address)
        monkeypatch.setenv(kubeflow.TOKEN, str(tmp_path / "token"))
        fed(made_logger("kubeflow"), tmp_path / "run")
    assert len(posted) == 2, "the first step, and the end: not each step"
    assert {headers["Authorization"] for headers, _ in posted} == {"Bearer secret"}
    (first, last) = [json.loads(body)["trainerStatus"] for _, body in posted]
    assert (first["progressPercentage"], first["estimatedRemainingSeconds"]) == (16, 5)
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {each["name"]: each["value"] for each in last["metrics"]}
    assert metrics["loss"] == "1.75" and metrics["recoveries"] == "1" and metrics["uncovered_stages"] == "0"
    assert last.keys() == {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    fed(made_logger("kubeflow"), tmp_path / "run")  # nobody listens there any more
    assert "the progress was not taken" in capsys.readouterr().out
    monkeypatch.delenv(kubeflow.URL)
    fed(made_logger("kubeflow"), tmp_path / "run")
    assert "is not set: no TrainJob" in capsys.readouterr().out

"""The sources of progress: each step once, though files grow by parts of lines, are begun again, or hold nonsense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bamboo
from engine.core.checks.external_verdict import StepReport
from engine.core.errors import UserError
from engine.external.progress import (
    FirstSource,
    GrowingFile,
    JsonSteps,
    OutputSteps,
    ProgressSource,
    ReportedSteps,
    TensorBoardSteps,
    reported_states,
)


def _new(source: ProgressSource) -> list[tuple[object, ...]]:
    return [(each.rank, each.step, each.loss) for each in source.read()]


def test_a_report_is_read_once_and_a_torn_one_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_PROGRESS", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    source = ReportedSteps(tmp_path)
    assert [*source.read()] == []
    bamboo.progress(0, loss=float("nan"), samples=[5, "six"])
    bamboo.fingerprint({}, step=0)
    (report,) = source.read()
    assert report._replace(at_ns=0, loss=None) == StepReport(0, 0, 1, str(os.getpid()), None, (5, "six"))
    assert repr(report.loss) == "nan"
    path = tmp_path / f"1-{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write('{"t_ns": 1, "step": "one"}\n[1]\n{"t_ns": 1, "st')
    bamboo.progress(1)
    bamboo.progress(2)
    assert _new(source) == [(1, 2, None)]
    assert source.unread == 3
    states, unread = reported_states(tmp_path)
    assert [(state.rank, state.step, state.tensors) for state in states] == [(1, 0, {})] and unread == 0


def test_output_is_matched_line_by_line_with_the_rank_that_the_launcher_writes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    source = OutputSteps(path, r"step (?P<step>\S+) loss=(?P<loss>\S+)")
    assert _new(source) == []
    path.write_text("[default1]:step 3 loss=0.5\nhello\nstep x loss=1\nstep 4 lo")
    assert _new(source) == [(1, 3, 0.5)]
    assert source.unread == 1
    with path.open("a") as file:
        file.write("ss=1e-3\n")
    assert _new(source) == [(None, 4, 0.001)]
    path.write_text("step 5 loss=1\n")  # begun again
    assert _new(source) == [(None, 5, 1.0)]
    with_rank = OutputSteps(path, r"step (?P<step>\d+) loss=(?P<rank>\d)")
    assert _new(with_rank) == [(1, 5, None)]


@pytest.mark.parametrize("pattern", ["(", "step (\\d+)"])
def test_a_pattern_without_a_step_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"progress: expected a regular expression with a group \(\?P<step>"):
        OutputSteps(Path("log"), pattern)


def test_lines_of_json_with_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 3, "train/loss": 2, "r": 1}\n{"eval": 1}\nnonsense\n{"global_step": true}\n')
    source = JsonSteps(path, "global_step", "train/loss", "r")
    assert (_new(source), source.unread) == ([(1, 3, 2.0)], 1)


def test_event_files_of_tensorboard_while_they_grow(tmp_path: Path) -> None:
    proto = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    source = TensorBoardSteps(tmp_path / "runs")
    assert _new(source) == []
    for suffix in (".first", ".second"):
        writer = EventFileWriter(str(tmp_path / "runs" / "a"), filename_suffix=suffix)
        for step in range(3):
            event = proto.Event(wall_time=1e9 + step, step=step)
            event.summary.value.add(tag="loss", simple_value=0.5)
            event.summary.value.add(tag="norm", simple_value=3)
            writer.add_event(event)
        writer.close()
    paths = sorted((tmp_path / "runs" / "a").iterdir())
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-7])
    reports = [*source.read()]
    assert [each.step for each in reports] == [0, 1, 2, 0, 1]
    assert {each.loss for each in reports} == {0.5} and source.tag == "loss"
    assert [each.process for each in reports] == [paths[0].name] * 3 + [paths[1].name] * 2
    assert reports[2].at_ns - reports[0].at_ns == pytest.approx(2e9, abs=1e8)
    paths[1].write_bytes(whole)
    assert _new(source) == [(None, 2, 0.5)]


def test_the_first_source_that_has_steps_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "log"
    output.write_text("step 0\n")
    both = FirstSource([ReportedSteps(tmp_path), OutputSteps(output, r"step (?P<step>\d+)")])
    assert _new(both) == [(None, 0, None)]
    monkeypatch.setenv("BAMBOO_PROGRESS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    bamboo.progress(0)
    output.write_text("step 0\nstep 1\n")
    assert _new(both) == [(0, 0, None)]
    assert [(each.rank, each.step) for each in both.reports()] == [(0, 0)]


def test_a_file_without_line_ends_costs_no_memory_and_only_its_own_lines(tmp_path: Path) -> None:
    """A job could fill the memory of bamboo with one line, or with one record whose length is nonsense."""
    path = tmp_path / "metrics.jsonl"
    source = JsonSteps(path)
    source._file.most = 64
    path.write_text('{"step": 1}\n' + "x" * 1000)
    assert _new(source) == [(None, 1, None)]
    assert len(source._file._rest) <= 64
    with path.open("a") as file:
        file.write("x" * 1000 + '\n{"step": 2}\n')
    assert (_new(source), source.unread) == ([(None, 2, None)], 1)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(b"\xff" * 16 + bytes(1000))
    records = GrowingFile(events)
    assert [*records.records()] == [b"\xff"] and [*records.records()] == []

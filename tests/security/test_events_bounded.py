"""The events of a run survive torn lines and short writes, and take a bounded space."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.codec.records import encoded
from engine.core.checks.samples import miscounted
from engine.core.errors import StorageError
from engine.core.history.evidence import linked, linked_lines
from engine.core.history.process_records import HeardRecord
from engine.core.history.run_history import gaps, left_out_steps
from engine.core.history.run_records import (
    VERSION,
    AuditRecord,
    FaultRecord,
    JobRecord,
    PreparedRecord,
    StampedRecord,
    UnreadLine,
)
from engine.core.history.step_files import FOLDER, entry, span_of
from engine.core.job.job import Job
from engine.files.events_file import StepReader, read_events, read_history
from engine.report.load import load
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import LogRetention, Recorder, StepWriter, open_events, open_steps
from tests.core.made_records import lines_of, made, records_of

NAME = "20261121-100000-made-0a1b"
JOB, GO = made("job"), made("go")
HALF = encoded(made("commit"))[:40]
BEGIN: list[dict[str, Any]] = [
    {"event": "job", "steps": 1, "stages": 1},
    {"event": "started", "of": 0, "child": 5, "slots": [[0, 0]]},
    {"event": "epoch", "owners": [0], "shadows": [[]]},
    {"event": "go"},
]
END: list[dict[str, Any]] = [{"event": "commit", "step": 0}, {"event": "training_ended"}, {"event": "ended"}]


def cut_once(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Lets the kernel take only `at` bytes of the next write, as it does at the last bytes of a disk."""
    real, calls = os.write, iter([at])

    def write(fd: int, data: bytes) -> int:
        return real(fd, data[: next(calls, len(data))])

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("at", [0, 1, 30, -1])
def test_a_record_of_which_the_kernel_took_a_part_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before, the rest was lost, and the half line refused the whole file."""
    fd = open_events(tmp_path / "events.jsonl")
    recorder = Recorder(fd, -1)
    recorder.write(JOB)
    record = PreparedRecord(epoch=1, at_ns=5, worker=-1, pid=os.getpid())
    cut_once(monkeypatch, at if at >= 0 else len(linked(encoded(record), "")[0]))
    recorder.write(record)
    monkeypatch.undo()
    recorder.write(GO)
    os.close(fd)
    found = list(read_events(tmp_path / "events.jsonl"))
    assert [each for each in found if not isinstance(each, UnreadLine)][1] == record
    assert len(found) == 3 + (0 < at)


@pytest.mark.parametrize(
    ("torn", "salvaged"),
    [
        (HALF, 0),
        (HALF + encoded(GO), 1),
        (HALF + HALF, 0),
        ("\0" * 300, 0),
        ('{"event":', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"event":' * 50_000, 0),
    ],
    ids=range(8),
)
def test_a_torn_line_costs_itself_only(tmp_path: Path, torn: str, salvaged: int) -> None:
    """Before, one half line in the middle made all events of the run unreadable."""
    path = tmp_path / "events.jsonl"
    path.write_text(f"{encoded(JOB)}\n{torn}\n{encoded(GO)}\n")
    assert list(read_events(path)) == [JOB, UnreadLine(number=2), *[GO] * salvaged, GO]


def test_a_file_of_other_contents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for text in ("step,loss\n0,1.5\n", "\n", f"{HALF}\n{encoded(JOB)}\n", f"{encoded(GO)}\n"):
        path.write_text(text)
        with pytest.raises(StorageError, match=r"events\.jsonl:1: "):
            list(read_events(path))


def test_report_page_and_status_say_which_line_was_torn(tmp_path: Path) -> None:
    """Before, `report` and `status` of such a run ended with 74."""
    folder = tmp_path / NAME
    folder.mkdir()
    lines = linked_lines(map(encoded, records_of([*BEGIN, *END]))).splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join([*lines[: len(BEGIN)], f"{HALF}\n", *lines[len(BEGIN) :]]))
    said = "1 line of events.jsonl could not be read (line 5)"
    reported = CliRunner().invoke(app, ["report", NAME, "--results", str(tmp_path)])
    assert reported.exit_code == 0, reported.output
    assert said in reported.stderr
    assert said in (folder / "report.html").read_text()
    status = CliRunner().invoke(app, ["status", NAME, "--results", str(tmp_path), "--json"])
    assert json.loads(status.stdout)["gaps"] == [said]
    assert json.loads(status.stdout)["committed"] == 0


STRUCK = 1_234


def a_long_run(folder: Path, limit: int, *, is_heard: bool) -> int:
    """Records 2500 steps of two workers as their processes do, with a fault in one; returns the most bytes it took.

    With `is_heard` another host coordinates the run, and this one hears of its decisions.
    """
    job = Job(stages=2, microbatches=8, steps=2500, events_max=f"{limit // 1000}kB")
    span, most = span_of(job), 0
    events_fd, steps_fd = open_events(folder / "events.jsonl"), open_steps(folder / FOLDER)
    thinning = LogRetention(steps_fd, events_fd, span, limit)
    agent = Recorder(events_fd, -1, StepWriter(steps_fd, None, span), thinning)
    workers = [Recorder(events_fd, worker, StepWriter(steps_fd, worker, span)) for worker in (0, 1)]
    agent.write(JobRecord(version=VERSION, job=job))
    for event in [*BEGIN[1:], {"event": "started", "of": 1, "child": 6, "slots": [[0, 1]]}]:
        agent.write(made(**event))

    def decide(record: StampedRecord) -> None:
        if is_heard:
            agent.write(HeardRecord(of="b", line=encoded(replace(record, at_ns=now_ns()))))
            agent.hear(record)
        else:
            agent.write(record)

    for step in range(job.steps):
        if step == STRUCK:
            decide(made("fault", step=step))
        for worker in workers:
            for microbatch in range(8):
                for op in "FB":
                    worker.action(1, step, f"{worker.worker}{op}{microbatch}", now_ns(), now_ns())
        agent.write(AuditRecord(of=0, step=step, pipeline=0, rows=((0, "f" * 64, "e" * 64),)))
        decide(made("commit", step=step, at_ns=0))
        if step % span == span - 1:
            most = max(most, sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()))
    for fd in (events_fd, steps_fd):
        os.close(fd)
    return most


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_run_takes_the_bytes_that_it_may_and_says_what_it_left_out(tmp_path: Path, is_heard: bool) -> None:
    """Before, a day of the demo wrote 28 GB of events, and nothing bounded them."""
    folder = tmp_path / NAME
    folder.mkdir()
    most = a_long_run(folder, 1_500_000, is_heard=is_heard)
    span = span_of(Job(stages=2, microbatches=8))
    assert most < 1_500_000 + 2 * span * 1500  # the range that is open
    history = read_history(folder / "events.jsonl")
    assert len(history.commits) == 2500 and len(history.of(FaultRecord)) == 1
    kept = history.files and history.files.ranges().keys()
    assert kept
    assert {0, STRUCK // span * span, 2499 // span * span} <= kept
    left_out = {step for first, last in left_out_steps(history) for step in range(first, last + 1)}
    assert left_out == {*range(2500)} - {step for first in kept for step in range(first, first + span)}
    assert miscounted(history, history.job) == []  # every step that is there has all its samples
    (said,) = gaps(history)
    assert said.startswith(f"the actions and hashes of steps {span} to ")
    reported = CliRunner().invoke(app, ["report", NAME, "--results", str(tmp_path)])
    assert reported.exit_code == 0, reported.output
    assert said in reported.stderr
    assert said[1:] in (folder / "report.html").read_text()
    status = CliRunner().invoke(app, ["status", NAME, "--results", str(tmp_path), "--json"])
    assert json.loads(status.stdout)["gaps"] == [said]
    assert json.loads(status.stdout)["workers"][0]["last_action"] == "0B7"


def test_an_entry_of_which_the_kernel_took_a_part_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_fd = open_steps(tmp_path / FOLDER)
    worker = Recorder(-1, 0, StepWriter(steps_fd, 0, 10))
    for step, at in enumerate((0, 1, 31)):
        cut_once(monkeypatch, at)
        worker.action(1, step, "0F0", 5, 6)
        monkeypatch.undo()
    os.close(steps_fd)
    assert [each.step for each in StepReader(tmp_path).actions([0], {})] == [0, 1, 2]


def test_a_link_in_the_folder_of_steps_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    steps_fd = open_steps(tmp_path / FOLDER)
    (tmp_path / FOLDER / "actions-0-0.bin").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        StepWriter(steps_fd, 0, 10).append(0, b"x")
    os.close(steps_fd)
    assert (tmp_path / "other").read_bytes() == b""
    assert StepReader(tmp_path).num_bytes == 0


def test_a_report_says_that_actions_are_gone(tmp_path: Path) -> None:
    """A deleted folder of actions gave a recovery with 0 redone actions, as if it had been so."""
    (tmp_path / "events.jsonl").write_text(lines_of([*BEGIN, *END]))
    assert load(read_history(tmp_path / "events.jsonl")).gaps == (
        "the actions of 1 step from step 0 on are gone: no time includes them",
    )


def test_damaged_actions_do_not_make_a_run_longer(tmp_path: Path) -> None:
    """Random bytes that pass for an action made the run last for a hundred years."""
    (tmp_path / "events.jsonl").write_text(lines_of([*BEGIN, *END]))
    StepWriter(open_steps(tmp_path / FOLDER), 0, 10).append(0, entry(0, 0, "0F0", 5, 2**62))
    assert load(read_history(tmp_path / "events.jsonl")).end_ms < 1e6


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_events_that_never_end_are_refused(tmp_path: Path, kind: str) -> None:
    """A pipe, or a link to a device without an end, held the status for ever."""
    path = tmp_path / "events.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=r"events\.jsonl"):
        read_history(path)

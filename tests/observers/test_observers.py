"""Loggers as processes: one that raises, blocks, computes without end or leaves ends alone, and its end is bounded."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.core.job.job import Job
from engine.observers import observers
from engine.observers.loggers import FILE
from engine.observers.observers import observing
from tests.core.made_records import lines_of
from tests.observers.test_following import EVENTS

LOGGERS = """
import os, time

class Raises:
    def step(self, done):
        if done.step == 1:
            raise RuntimeError("full")

class Blocks:
    def step(self, done):
        time.sleep(3600)

class Computes:
    def finish(self, done):
        while True:
            pass

class Leaves:
    def start(self, job, folder):
        os._exit(0)
"""


def test_the_end_of_each_logger_is_told_and_no_other_one_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loggers.py").write_text(LOGGERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observers, "DRAIN_S", 2.0)
    run, said = tmp_path / "run", list[str]()
    (run / "logs").mkdir(parents=True)
    job = replace(Job(), logger="csv,loggers:Raises,loggers:Blocks,loggers:Computes,loggers:Leaves")
    before = set(psutil.Process().children())  # of other tests of this process
    with observing(job, run / "events.jsonl", run / "logs", said.append) as found:
        (run / "events.jsonl").write_text(lines_of(EVENTS))
        begun_s = time.monotonic()
        watch = found.watching(lambda view: None, lambda view: True)
        computes = next(each for each in found.observers if each.name.endswith("Computes"))
        while not computes.is_slowed:
            watch(None)
            assert time.monotonic() - begun_s < 20.0
            time.sleep(0.05)
        assert os.sched_getscheduler(computes.process.pid) == os.SCHED_IDLE
        ends = {each["logger"].rpartition(":")[2]: each for each in found.finish(2)}
        assert time.monotonic() - begun_s < 40.0  # the busy machine of a test; 2 s are the limit
        assert set(psutil.Process().children()) <= before
    assert [name for name, each in ends.items() if each["whole"]] == ["csv"]
    assert {name: each["last_step"] for name, each in ends.items()} == {
        "csv": 2,
        "Raises": 0,
        "Blocks": -1,
        "Computes": 2,
        "Leaves": -1,
    }
    assert len((run / FILE).read_text().splitlines()) == 6
    told = {each.partition(" ")[2].partition(" ")[0].rpartition(":")[2]: each for each in said}
    assert told.keys() == {"Raises", "Leaves", "Blocks", "Computes"}
    line = f"loggers:Raises has ended, training continues: RuntimeError: full ({tmp_path}/loggers.py:7, in step)"
    assert line in told["Raises"]
    assert "has ended, training continues: it ended with exit code 0" in told["Leaves"]
    assert "was ended" in told["Blocks"] and "it has logged 0 of 3 steps" in told["Blocks"]
    assert "was ended" in told["Computes"]
    assert "Traceback" in (run / "logs" / "logger-loggers.Raises.log").read_text()


def test_a_logger_that_takes_long_to_begin_has_the_whole_time_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text("import time\ntime.sleep(4)\n\nclass Late:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observers, "DRAIN_S", 2.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "events.jsonl").write_text(lines_of(EVENTS))
    job = replace(Job(), logger="late:Late")
    with observing(job, tmp_path / "events.jsonl", tmp_path / "logs", print) as late:
        (end,) = late.finish(2)
        assert (end["whole"], end["last_step"], end["error"]) == (True, 2, "")
    monkeypatch.setattr(observers, "START_S", 1.0)
    with observing(job, tmp_path / "events.jsonl", tmp_path / "logs", print) as late:
        (end,) = late.finish(2)
        assert (end["whole"], end["error"]) == (False, "it took longer than 2.0 s after the end of training")

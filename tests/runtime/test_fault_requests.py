"""Faults that are asked for while a job runs: who may ask, and for what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.action import Action, Op
from engine.core.errors import BambooError
from engine.core.faults.fault import After, At, Fault, Owner, Role, Worker, to_plain
from engine.core.job.job import Job
from engine.runtime.agent.injector import FaultRequests, read_request
from engine.runtime.agent.requests import RequestFile
from engine.runtime.process.recorder import Recorder, open_events
from tests.looped import looped

JOB = Job(stages=3, microbatches=4, steps=8)
WORKERS = (0, 1, 2)
MOMENT = At(3, Action(1, Op.B, 2))
GOOD = (
    Fault("a", MOMENT, (Owner(0, 1), Worker(2), Role("shadow")), "stop", {"for_ns": 5}),
    Fault("b", After("a", "plan", 7), (Role("recoverer"),), "slow", {"factor": 2.5}),
)


def written(*faults: Fault) -> str:
    return json.dumps([to_plain(fault) for fault in faults])


def changed(**fields: Any) -> str:
    return json.dumps([to_plain(GOOD[0]) | fields])


def test_a_good_request_is_read() -> None:
    assert read_request(written(*GOOD), JOB, WORKERS, ()) == GOOD
    assert read_request(written(GOOD[1]), JOB, WORKERS, ("a",)) == GOOD[1:]


@looped(
    "text",
    [
        "",
        "{}",
        "[3]",
        "[{}]",
        written(GOOD[0], GOOD[0]),
        written(GOOD[1]),  # after a fault that nobody knows
        changed(id="../x"),
        changed(id=7),
        changed(more=1),
        changed(do="rm"),
        changed(do=["kill"]),
        changed(victims=[]),
        changed(victims=[{"worker": 3}]),
        changed(victims=[{"worker": True}]),
        changed(victims=[{"pipeline": 1, "stage": 1}]),
        changed(victims=[{"pid": 1}]),
        changed(victims=[{"role": "launcher"}]),
        changed(parameters={"for_ns": -1}),
        changed(parameters={"for_ns": "5s"}),
        changed(parameters={"factor": 2.0}),
        changed(do="hang", parameters={"gil": "stolen"}),
        changed(moment={"step": 8, "action": "1B2", "when": "before"}),
        changed(moment={"step": 3, "action": "3B2", "when": "before"}),
        changed(moment={"step": 3, "action": "1X2", "when": "before"}),
        changed(moment={"step": 3, "action": "1B2", "when": "later"}),
        changed(moment={"step": "3", "action": "1B2", "when": "before"}),
        changed(moment={"fault": "a", "phase": "lunch", "delay_ns": 0}),
        changed(moment=None),
    ],
)
def test_a_request_with_anything_wrong_is_refused(text: str) -> None:
    with pytest.raises((ValueError, BambooError)):
        read_request(text, JOB, WORKERS, ())


def test_an_id_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="a unique id"):
        read_request(written(GOOD[0]), JOB, WORKERS, ("a",))


class Listener:
    """Stands for the injector."""

    def __init__(self) -> None:
        self.injection = SimpleNamespace(known=frozenset())
        self.added: list[Fault] = []

    def add(self, faults: tuple[Fault, ...]) -> None:
        self.added += faults


def look(folder: Path) -> tuple[list[Fault], list[dict[str, Any]]]:
    fd = open_events(folder / "events.jsonl")
    listener: Any = Listener()
    FaultRequests(folder, JOB, WORKERS, Recorder(fd, -1)).look(listener)
    os.close(fd)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return listener.added, events


def put(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "request-1.json"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_request_is_taken_once(tmp_path: Path) -> None:
    path = put(tmp_path, written(*GOOD))
    added, (event,) = look(tmp_path)
    assert added == list(GOOD)
    assert (event["event"], event["request"], event["faults"]) == ("request", "request-1.json", ["a", "b"])
    assert not path.exists()
    assert look(tmp_path)[0] == []


def test_a_request_that_is_withdrawn_while_it_is_read_strikes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, written(*GOOD))

    def text(self: RequestFile) -> str:
        path.unlink()
        return written(*GOOD)

    monkeypatch.setattr(RequestFile, "text", text)
    assert look(tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("[{}]", 0o600, "expected a fault"),
        (written(*GOOD), 0o620, "mode 0600"),
        (written(*GOOD), 0o604, "mode 0600"),
        (" " * 70_000, 0o600, "longer than 65536 bytes"),
    ],
)
def test_a_bad_request_is_refused_in_the_events_and_removed(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    path = put(tmp_path, text, mode)
    added, (event,) = look(tmp_path)
    assert added == []
    assert event["event"] == "refused"
    assert reason in event["reason"]
    assert not path.exists()


def test_a_link_to_somewhere_else_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(written(*GOOD))
    elsewhere.chmod(0o600)
    (tmp_path / "request-1.json").symlink_to(elsewhere)
    added, (event,) = look(tmp_path)
    assert (added, event["event"], elsewhere.exists()) == ([], "refused", True)


def test_a_pipe_does_not_hold_the_launcher_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "request-1.json", 0o600)
    added, (event,) = look(tmp_path)
    assert (added, event["event"]) == ([], "refused")

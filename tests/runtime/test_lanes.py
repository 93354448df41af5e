"""Lanes: every task is answered once, a slow or dead lane costs its own task only, and nothing is left of any."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.core.message_kinds import Plain
from engine.core.messages import CaseMessage, DoneMessage
from engine.runtime.process.fork_client import Lanes
from engine.runtime.process.link import Link

THIS_MODULE = "tests.runtime.test_lanes"


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane finds its module on Python's path only, not in the current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def answered(tmp_path: Path, tasks: list[dict[str, Any]], count: int, limit_s: float = 30.0) -> dict[int, Any]:
    """Runs tasks in lanes that this module makes; returns the answers by number of the task."""
    answers: dict[int, Any] = {}

    def take(task: dict[str, Any], answer: Plain) -> None:
        assert task["number"] not in answers
        answers[task["number"]] = answer["result"]["pid"] if "result" in answer else answer

    before = set(psutil.Process().children(recursive=True))  # what tests of this package share
    with Lanes(THIS_MODULE, count, tmp_path) as lanes:
        lanes.run(({"number": number, **task} for number, task in enumerate(tasks)), limit_s, take)
    assert set(psutil.Process().children(recursive=True)) <= before
    return answers


def test_every_task_is_answered_once(tmp_path: Path) -> None:
    answers = answered(tmp_path, [{"do": "say"}] * 7, 3)
    assert sorted(answers) == list(range(7))
    assert len(set(answers.values())) == 3, "three processes have answered"


def test_lanes_work_side_by_side(tmp_path: Path) -> None:
    answers = answered(tmp_path, [{"do": "meet", "place": str(tmp_path / name)} for name in ("a", "b")], 2)
    assert set(answers) == {0, 1}
    assert all(isinstance(each, int) for each in answers.values())


def test_a_lane_that_is_too_slow_has_hung(tmp_path: Path) -> None:
    answers = answered(tmp_path, [{"do": "sleep"}, {"do": "say"}, {"do": "say"}], 1, limit_s=8.0)
    assert answers[0] == {"ended": "hang"}
    assert answers[1] == answers[2]


def test_a_lane_that_dies_costs_its_own_task(tmp_path: Path) -> None:
    answers = answered(tmp_path, [{"do": "die"}, {"do": "say"}], 1)
    assert answers[0] == {"ended": -signal.SIGKILL}
    assert isinstance(answers[1], int)


def test_no_task_starts_no_lane(tmp_path: Path) -> None:
    assert answered(tmp_path, [], 2) == {}
    assert list(tmp_path.iterdir()) == []


def _lane(link: Link) -> None:
    while isinstance(message := link.receive(), CaseMessage):
        task = message.task
        match task["do"]:
            case "sleep":
                time.sleep(60)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "meet":
                _meet(Path(task["place"]))
        link.send(DoneMessage({"pid": os.getpid()}))


def _meet(place: Path) -> None:
    """Waits until the other has come too, which it only does if it runs at the same time."""
    place.touch()
    until_s = time.monotonic() + 20
    while not all((place.parent / name).exists() for name in ("a", "b")):
        assert time.monotonic() < until_s
        time.sleep(0.01)


if __name__ == "__main__":
    _lane(Link.from_fd(int(sys.argv[1])))

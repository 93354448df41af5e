"""Requests to a running job: each is answered and removed, and none ends the launcher, whatever the file is.

Before, deep brackets and a huge delay ended the run with an internal error, Infinity was taken as a factor, and a
request that could not be removed was handled again in every tick.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.faults.fault import MOST_NS, After, Fault, Parameter, Role, to_plain
from engine.core.messages import ArmMessage
from engine.harness.attach import _Events, _wait
from engine.runtime.agent.injector import FaultRequests, read_request
from engine.runtime.process.link import packet
from engine.runtime.process.recorder import Recorder, open_events
from tests.core.made_records import lines_of
from tests.runtime.test_fault_requests import GOOD, JOB, WORKERS, Listener, changed, written

DIGITS = "9" * 400
FIRST = to_plain(GOOD[0])


def with_number(text: str) -> str:
    """Returns a request whose ``for_ns`` has this text."""
    return changed(parameters={"for_ns": 5}).replace('"for_ns": 5', f'"for_ns": {text}')


def slow_by(text: str) -> str:
    return changed(do="slow", parameters={"factor": 5}).replace('"factor": 5', f'"factor": {text}')


def after(delay: str) -> str:
    plain = to_plain(Fault("b", After("a", "plan", 7), (Role("recoverer"),), "kill"))
    return json.dumps([FIRST, plain]).replace('"delay_ns": 7', f'"delay_ns": {delay}')


# name -> the content of a request that is refused
HOSTILE: dict[str, str] = {
    "deep lists": "[" * 60_000,
    "deep lists, closed": "[" * 30_000 + "]" * 30_000,
    "deep mappings": '{"a":' * 12_000,
    "a deep field": changed(victims=[]).replace('"victims": []', '"victims": ' + "[" * 500 + "]" * 500),
    "brackets beside a text": json.dumps(["]" * 100]).replace('"]]', '"]] [[') + "[" * 60_000,
    "a delay that is no float": after(f"1{'0' * 400}"),
    "a delay of some days": after(str(MOST_NS + 1)),
    "more digits than Python reads": after("9" * 20_000),
    "an endless time": with_number(DIGITS),
    "Infinity": slow_by("Infinity"),
    "NaN": slow_by("NaN"),
    "a float beyond all": slow_by("1e999"),
    "a factor beyond all": slow_by(DIGITS),
    "a negative factor": slow_by("-1"),
    "a huge step": changed(moment={"step": 10**30, "action": "1B2", "when": "before"}),
    "a huge action": changed(moment={"step": 3, "action": f"{DIGITS}B2", "when": "before"}),
    "a huge worker": changed(victims=[{"worker": 10**400}]),
    "many victims": changed(victims=[{"worker": 0}] * 65),
    "many faults": json.dumps([{"id": str(number)} for number in range(257)]),
    "no fault": "[]",
    "a long id": changed(id="x" * 101),
    "an id with a control character": changed(id="x\x1b[2J"),
    "half a character": changed(id="\ud800"),
    "more bytes than read": json.dumps([FIRST]) + " " * 65_536,
    "longer in ASCII": json.dumps([FIRST | {"id": "\u20ac" * 12_000}], ensure_ascii=False),
    "a moment that is no mapping": changed(moment=[1]),
    "parameters in pairs": changed(parameters=[["for_ns", 5]]),
    "a victim that is none": changed(victims=[[]]),
    "no text": "\x00",
}


def places(folder: Path) -> list[Path]:
    """Makes in a folder of a run all hostile requests, also those that are no files, and returns them."""
    made = []
    for number, text in enumerate(HOSTILE.values()):
        made.append(folder / f"request-{number}.json")
        fd = os.open(made[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, text.encode("utf-8", "surrogatepass"))
        os.close(fd)
    made += [folder / f"request-{name}.json" for name in ("dir", "fifo", "link", "loop", "bytes", "\x1b[2J")]
    made[-6].mkdir()
    os.mkfifo(made[-5], 0o600)
    made[-4].symlink_to("/etc/passwd")
    made[-3].symlink_to(made[-3].name)
    for each in made[-2:]:
        each.write_bytes(b"\xff\xfe[")
        each.chmod(0o600)
    return made


class Watched:
    """The requests in one folder, and the events of its run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.fd = open_events(folder / "events.jsonl")
        self.listener: Any = Listener()
        self.requests = FaultRequests(folder, JOB, WORKERS, Recorder(self.fd, -1))

    def look(self) -> list[dict[str, Any]]:
        """Lets the launcher look once and returns the events since the last look."""
        path = self.folder / "events.jsonl"
        known = len(path.read_text().splitlines())
        self.requests.look(self.listener)
        return [json.loads(line) for line in path.read_text().splitlines()[known:]]


def open_in(folder: Path) -> int:
    """Returns how many descriptors of this process are of files in a folder."""
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(each).startswith(f"{folder}") for each in links)


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.parametrize("name", HOSTILE)
def test_each_is_refused(run: Watched, name: str) -> None:
    path = run.folder / "request-1.json"
    path.write_bytes(HOSTILE[name].encode("utf-8", "surrogatepass"))
    path.chmod(0o600)
    begin_s = time.process_time()
    (event,) = run.look()
    assert (event["event"], event["request"]) == ("refused", path.name)
    assert 0 < len(event["reason"]) <= 500
    assert run.listener.added == []
    assert not path.exists()
    assert time.process_time() - begin_s < 1.0


def test_of_a_flood_a_look_answers_some_and_later_looks_the_rest(run: Watched) -> None:
    for number in range(50):
        (run.folder / f"request-{number:02}.json").write_text("[")
    (run.folder / "report.html").write_text("not a request")
    answered = [[event["request"] for event in run.look()] for _ in range(5)]
    assert [len(each) for each in answered] == [16, 16, 16, 2, 0]
    assert sorted(each for names in answered for each in names) == [f"request-{number:02}.json" for number in range(50)]
    assert (run.folder / "report.html").exists()


def test_of_good_requests_a_look_takes_one(run: Watched) -> None:
    """The messages about its faults go to every worker, whose buffers are bounded."""
    for number in range(3):
        path = run.folder / f"request-{number}.json"
        path.write_text(json.dumps([to_plain(GOOD[0]) | {"id": f"fault-{number}"}]))
        path.chmod(0o600)
    assert [[event["event"] for event in run.look()] for _ in range(4)] == [["request"], ["request"], ["request"], []]


def test_what_cannot_be_removed_is_answered_once(run: Watched) -> None:
    """Before, a folder with the name of a request was refused in each tick, for as long as the run went on."""
    path = run.folder / "request-full.json"
    (path / "inner").mkdir(parents=True)
    assert [event["event"] for event in run.look()] == ["refused"]
    num_open = open_in(run.folder)
    assert [run.look() for _ in range(3)] == [[], [], []]
    assert open_in(run.folder) == num_open
    assert path.is_dir()


def test_a_good_request_that_cannot_be_removed_strikes_once(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.folder / "request-1.json"
    path.write_text(written(*GOOD))
    path.chmod(0o600)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    assert [event["event"] for event in run.look()] == ["request"]
    assert run.look() == []
    assert run.listener.added == list(GOOD)


def test_a_request_of_any_form_is_answered_and_gone(run: Watched) -> None:
    made = places(run.folder)
    reasons = {event["request"]: event["reason"] for _ in range(4) for event in run.look()}
    assert reasons.keys() == {each.name for each in made}
    assert [each for each in made if os.path.lexists(each)] == []
    assert "regular file" in reasons["request-fifo.json"]
    assert Path("/etc/passwd").exists()
    assert open_in(run.folder) == 1, "the events, and no request"


def test_a_request_that_cannot_be_read_is_refused(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.folder / "request-1.json"
    path.write_text(written(*GOOD))
    path.chmod(0o600)

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    (event,) = run.look()
    assert (event["event"], "Permission denied" in event["reason"]) == ("refused", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_request_of_another_user_is_refused(run: Watched) -> None:
    path = run.folder / "request-1.json"
    path.write_text(written(*GOOD))
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    (event,) = run.look()
    assert (event["event"], event["reason"]) == ("refused", "expected a regular file of this user with mode 0600")
    assert run.listener.added == []


def test_an_error_of_any_kind_in_the_judgement_is_an_answer(run: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr("engine.runtime.agent.injector.read_request", fail)
    path = run.folder / "request-1.json"
    path.write_text("[]")
    path.chmod(0o600)
    (event,) = run.look()
    assert event["reason"] == "it cannot be read (RecursionError)"


def test_deep_brackets_are_refused_on_a_deep_stack() -> None:
    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
            return
        with pytest.raises(ValueError, match="brackets in brackets"):
            read_request("[" * 60_000, JOB, WORKERS, ())

    deeper(sys.getrecursionlimit() - 300)


def test_a_run_has_a_bounded_number_of_faults() -> None:
    with pytest.raises(ValueError, match="at most 4096 faults in a run"):
        read_request(written(GOOD[0]), JOB, WORKERS, [str(number) for number in range(4096)])


def test_the_largest_request_fits_a_message_to_workers() -> None:
    faults = [to_plain(GOOD[0]) | {"id": f"{number:03}{'x' * 60}"} for number in range(256)]
    text = json.dumps(faults)
    assert len(text) < 65_536
    assert len(packet(ArmMessage(tuple(map(to_plain, read_request(text, JOB, WORKERS, ())))))) < 160_000


@pytest.mark.parametrize(
    ("parameter", "good", "bad"),
    [
        (Parameter("for", "duration", ""), (0, MOST_NS), (MOST_NS + 1, -1, True, 1.0)),
        (Parameter("code", "count", ""), (0, 10**9), (10**9 + 1, False, 2.0)),
        (Parameter("factor", "number", ""), (1e-9, 10**6), (0, float("inf"), float("nan"), 10**400, True)),
        (Parameter("text", "text", ""), ("", "x" * 1000), ("x" * 1001, 1)),
        (Parameter("gil", "choice", "", choices=("held",)), ("held",), ("free", [])),
    ],
)
def test_bounds_of_parameters(parameter: Parameter, good: tuple[object, ...], bad: tuple[object, ...]) -> None:
    """The same bounds hold in a scenario file: an endless pause overflowed the clock of a worker."""
    assert all(map(parameter.fits, good))
    assert not any(map(parameter.fits, bad))


def test_an_endless_duration_in_a_scenario_is_refused() -> None:
    pause = Parameter("for", "duration", "")
    assert pause.read("24h") == MOST_NS
    assert pause.read("999999999999h") is None
    assert pause.expected == "a duration such as 250ms, 5s or 2m, at most 24h"


def test_a_run_that_is_not_injectable_refuses_every_request(run: Watched) -> None:
    """Before, any process of the user could strike any run."""
    run.requests = FaultRequests(run.folder, JOB, WORKERS, Recorder(run.fd, -1), injectable=False)
    path = run.folder / "request-1.json"
    path.write_text(written(*GOOD))
    path.chmod(0o600)
    (event,) = run.look()
    assert (event["event"], event["reason"]) == ("refused", "the run was started with --injectable no")
    assert (run.listener.added, path.exists()) == ([], False)


def test_the_sender_is_told_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.jsonl").write_text(lines_of([{"event": "job"}]))
    run = Watched(tmp_path)
    (tmp_path / "request-1.json").write_text("[" * 60_000)
    (tmp_path / "request-1.json").chmod(0o600)
    run.look()
    monkeypatch.setattr(_Events, "is_over", lambda self: not self._update())

    class Folder:
        path, events = tmp_path, tmp_path / "events.jsonl"

    folder: Any = Folder
    with pytest.raises(UserError) as refusal:
        _wait(_Events(folder), GOOD, "request-1.json")
    assert "expected at most 8 brackets in brackets" in str(refusal.value)

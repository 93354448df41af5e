"""The notice source, with real commands and a real HTTP server: answers, limits, and nothing that stays behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.core.hosts.notice_answer import NoticeAnswer, NoticeFrom
from engine.core.protocol.state import Options, begin
from engine.runtime.agent import notice_source
from engine.runtime.agent.notice_source import NoticeSource

SOON_S = 20.0
S = 1_000_000_000


class Host:
    """Stands for the agent: its workers, the signals that they got, and the lines for the user."""

    def __init__(self, num_workers: int = 3):
        self.signalled: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.is_stopping = False
        options, owners = Options(stages=num_workers, redundant=True), tuple(range(num_workers))
        self.node = SimpleNamespace(state=begin(options, owners, ((),) * num_workers, 9, 0))
        self.grace_ns = 10 * S
        self.run_state = SimpleNamespace(note=self.notes.append)
        self.members = {each: self.handle(each) for each in range(num_workers)}

    def handle(self, worker: int, pid: int = 0) -> Any:
        child = SimpleNamespace(signal=lambda number: self.signalled.append((worker, number)), pid=pid or worker)
        return SimpleNamespace(child=child, exit_code=None)


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_PUT(self) -> None:
            answer(self)

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/notice"
        finally:
            server.shutdown()
            thread.join()


def says(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def told(wanted: NoticeFrom, until: Callable[[Host], object], wait_s: float = SOON_S) -> Host:
    """Returns the host after it has asked until something holds, or for some time."""
    host: Any = Host()
    source = NoticeSource(wanted._replace(every_s=0.05))
    with source.asking():
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s and not until(host):
            source.look(host)
            time.sleep(0.02)
    source.look(host)
    found: Host = host
    return found


def of_command(script: str, until: Callable[[Host], object] = lambda host: host.signalled, **more: Any) -> Host:
    return told(NoticeFrom((sys.executable, "-S", "-c", script)), until, **more)


def test_workers_that_a_command_names_get_sigterm_once() -> None:
    assert of_command("print('workers 0 2')").signalled == [(0, signal.SIGTERM), (2, signal.SIGTERM)]


@pytest.mark.parametrize("script", ["pass", "print('[]')", "print('1'); raise SystemExit(1)"])
def test_nothing_and_a_failing_command_are_no_notice(script: str) -> None:
    host = of_command(script, wait_s=0.8)
    assert (host.signalled, host.notes) == ([], [])


def test_a_worker_that_is_not_here_is_said_once() -> None:
    host = of_command("print('7')", lambda host: host.notes, wait_s=SOON_S)
    assert (host.signalled, host.notes) == (
        [],
        ["--notice-command: a notice for worker 7, but no such worker is here"],
    )


def test_a_waiting_worker_gets_its_notice_and_a_process_that_began_again_its_own() -> None:
    host: Any = Host()
    host.members[3] = host.handle(3)
    source = NoticeSource(NoticeFrom(("true",)))
    for _ in range(2):
        source._answers.put(NoticeAnswer((1, 3), "1 3"))
        source.look(host)
    assert [worker for worker, _ in host.signalled] == [1, 3]
    host.members[1] = host.handle(1, pid=99)
    source._answers.put(NoticeAnswer((1,), "1"))
    source.look(host)
    assert [worker for worker, _ in host.signalled] == [1, 3, 1]
    assert host.notes == []


def asked_of(steps_s: float, waiting: tuple[int, ...], *answers: tuple[int, ...] | None) -> tuple[list[int], list[str]]:
    """Returns who got a notice after some answers, and the notes, where workers wait and steps take so long."""
    host: Any = Host()
    host.node.state = host.node.state._replace(waiting=waiting, steps_ns=(round(steps_s * S),))
    host.members |= {each: host.handle(each) for each in waiting}
    source = NoticeSource(NoticeFrom(("true",)))
    before = signal.signal(signal.SIGTERM, lambda number, frame: host.signalled.append((-1, number)))
    try:
        for each in answers:
            source._answers.put(NoticeAnswer(each, str(each)))
            source.look(host)
    finally:
        signal.signal(signal.SIGTERM, before)
    return [worker for worker, _ in host.signalled], host.notes


def test_a_notice_for_all_members_leaves_the_job_to_a_worker_that_waits() -> None:
    """The run ended, and the worker that waits with it."""
    assert asked_of(1.0, (3,), (0, 1, 2), (0, 1, 2)) == ([0, 1, 2], [])
    assert asked_of(1.0, (3,), (0, 2), (1,)) == ([0, 2, 1], [])
    ended = "--notice-command: a notice for all workers, which no other host takes over: the run ends"
    assert asked_of(1.0, (3,), None) == ([-1], [ended]), "it is on the same host"
    assert asked_of(1.0, (3,), (0, 1, 2, 3)) == ([-1], [ended])
    short = "--notice-command: a notice for all workers, 10 s are not enough for worker 3, which waits: the run ends"
    assert asked_of(1.1, (3,), (0, 1, 2)) == ([-1], [short])


@pytest.mark.parametrize("text", ["TRUE", "[0, 1, 2]"])
def test_a_notice_for_the_host_is_said_and_is_one_for_the_launcher(text: str) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        host = of_command(f"print('{text}')", lambda host: host.notes)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
    assert host.signalled == []
    assert host.notes == ["--notice-command: a notice for all workers, which no other host takes over: the run ends"]


def test_a_command_that_stays_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n{{child.pid}}\\n")
time.sleep(600)
"""
    of_command(script, lambda host: pids.exists() and len(pids.read_text().split()) >= 2)
    for pid in map(int, pids.read_text().split()):
        end_s = time.monotonic() + SOON_S
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s, f"process {pid} stays behind"
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("while True: print('1' * 4000)", "it prints more than 64 KiB"),
        ("import time; time.sleep(600)", "it took longer than 0.5 s and was killed"),
    ],
)
def test_a_command_that_cannot_be_heard_is_said_once(script: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user believed to be warned; a flood had 5 s to fill the disk each time."""
    monkeypatch.setattr(notice_source, "_COMMAND_S", 5.0 if "print" in script else 0.5)
    host = of_command(script, lambda host: host.notes)
    assert host.notes == [f"cannot poll --notice-command: {text}"]


def test_a_child_that_keeps_the_pipe_open_delays_no_answer() -> None:
    script = """
import subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(1)
"""
    began_s = time.monotonic()
    assert of_command(script).signalled == [(1, signal.SIGTERM)]
    assert time.monotonic() - began_s < SOON_S


def test_no_shell_reads_a_command(tmp_path: Path) -> None:
    file = tmp_path / "made"
    command = (sys.executable, "-S", "-c", "pass", f"; touch {file}", f"$(touch {file})", "|", "touch", str(file))
    assert told(NoticeFrom(command), lambda host: False, wait_s=0.5).notes == []
    assert not file.exists()


def test_a_url_names_workers() -> None:
    with serving(says(200, b"[1]")) as url:
        assert told(NoticeFrom(url=url), lambda host: host.signalled).signalled == [(1, signal.SIGTERM)]


def test_a_url_is_asked_as_clouds_want_it() -> None:
    seen: list[tuple[str | None, str | None]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append((request.headers["Metadata-Flavor"], request.headers["Metadata"]))
        says(404, b"")(request)

    with serving(answer) as url:
        told(NoticeFrom(url=url), lambda host: seen)
    assert seen[0] == ("Google", "true")


def test_a_service_that_wants_a_token_is_asked_for_one_first() -> None:
    """It answered 401 for ever."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.command == "PUT":
            says(200, b"ticket" if request.headers["X-aws-ec2-metadata-token-ttl-seconds"] else b"")(request)
        else:
            says(200 if request.headers["X-aws-ec2-metadata-token"] == "ticket" else 401, b"[1]")(request)

    with serving(answer) as url:
        host = told(NoticeFrom(url=url, token_url=url), lambda host: host.signalled)
    assert (host.signalled, host.notes) == ([(1, signal.SIGTERM)], [])


def test_the_end_of_another_machine_of_the_group_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["another", "mine"]

    def answer(request: BaseHTTPRequestHandler) -> None:
        event = f'{{"Events": [{{"EventType": "Preempt", "Resources": ["{names[0]}"]}}]}}'
        says(200, b"mine\n" if request.path == "/name" else event.encode())(request)

    got: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", got.append)
    with serving(answer) as url:
        wanted = NoticeFrom(url=url, name_url=url.replace("/notice", "/name"))
        assert told(wanted, lambda host: got, wait_s=0.5).notes == []
        names.pop(0)
        (note,) = told(wanted, lambda host: got).notes
    assert "a notice for all workers" in note and got == [signal.SIGTERM]


@pytest.mark.parametrize("status", [404, 204])
def test_a_status_for_no_end_is_no_notice(status: int) -> None:
    with serving(says(status, b"" if status == 204 else b"[1]")) as url:
        host = told(NoticeFrom(url=url), lambda host: host.signalled, wait_s=0.5)
    assert (host.signalled, host.notes) == ([], [])


@pytest.mark.parametrize("status", [401, 500])
def test_a_status_that_says_nothing_is_said_once(status: int) -> None:
    """A metadata address that wants a token answers 401 for ever, and its user believed to be warned."""
    with serving(says(status, b"[1]")) as url:
        host = told(NoticeFrom(url=url), lambda host: host.notes)
    assert host.signalled == []
    (note,) = host.notes
    assert note.startswith(f"cannot poll --notice-url: it answered {status} ")


def test_no_redirection_is_followed() -> None:
    with serving(says(200, b"[1]")) as other, serving(says(302, b"", Location=other)) as url:
        host = told(NoticeFrom(url=url), lambda host: host.signalled, wait_s=0.5)
    assert host.signalled == []


def test_an_address_that_cannot_be_reached_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:9")  # it is not asked
    host = told(NoticeFrom(url="http://127.0.0.1:1/x"), lambda host: False, wait_s=0.5)
    (note,) = host.notes
    assert note.startswith("cannot poll --notice-url: ") and "refused" in note


def test_an_address_that_does_not_answer_takes_no_time_of_the_run() -> None:
    goes_on = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        goes_on.wait(SOON_S)

    with serving(answer) as url:
        began_s = time.monotonic()
        host = told(NoticeFrom(url=url), lambda host: host.notes)
        took_s = time.monotonic() - began_s
        goes_on.set()
    assert "timed out" in host.notes[0]
    assert took_s < SOON_S / 2

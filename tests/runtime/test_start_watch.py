"""The watch on a worker's start: code of the user that blocks is named while it blocks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.messages import BusyMessage, ReadyMessage
from engine.runtime.agent import worker_handles
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.worker import worker as start_watch
from engine.runtime.worker.microbatches import WatchedData
from engine.runtime.worker.worker import StartWatch

S = 1_000_000_000


class Source:
    """Data whose call does something else; a whereabouts too."""

    def __init__(self, act: Callable[[], object]):
        self._act = act

    def microbatch(self, *at: int) -> Any:
        """Blocks, as far as the clock of the test tells."""
        self._act()

    def load(self, is_loading: bool, *, ahead: bool) -> None:
        """Hears that a call begins or ends."""


def test_a_call_of_the_users_that_blocks_is_told_with_its_line_and_then_logged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before, the launcher waited for ten minutes for "worker 0; worker 1", and the logs were empty."""
    now, told = [7 * S], list[BusyMessage]()
    monkeypatch.setattr(start_watch, "now_ns", lambda: now[0])
    control: Any = type("Control", (), {"send": lambda self, message: told.append(message)})()
    watch = StartWatch(control)

    def look(*at_s: int) -> None:
        for now[0] in (each * S for each in at_s):
            ThreadPoolExecutor(1).submit(watch.look).result()

    def block() -> None:
        look(8, 10)
        assert told == [], "a part of two seconds is no news"
        look(11, 38)

    source: Any = Source(block)
    WatchedData(source, source).microbatch(0, 0, 0, 1)
    look(39)
    busy, over = told
    line = look.__code__.co_firstlineno + 2
    assert busy == BusyMessage("reads the data", f"tests/runtime/{Path(__file__).name}:{line}, in look", 8 * S)
    assert over == BusyMessage()
    log = capfd.readouterr().err
    assert log.startswith("it reads the data for 30 s; the stack of its main thread:\n")
    assert ", in block\n" in log


def test_the_agent_names_the_part_of_the_start_until_the_worker_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    child: Any = type("Child", (), {"pid": 12})
    none: Any = None
    member = WorkerHandle(0, ((0, 0),), child, none, Path("worker-0.log"))
    own: Any = SimpleNamespace()
    monkeypatch.setattr(worker_handles, "now_ns", lambda: 608 * S)
    assert Agent.take_own_part(own, member, BusyMessage("tries its layers", "mine.py:28, in forward", 8 * S))
    assert member.doing == "tries its layers for 600 s (mine.py:28, in forward)"
    assert member.account == f"worker 0 (pid 12), which {member.doing}, wrote worker-0.log"
    assert not Agent.take_own_part(own, member, ReadyMessage())
    assert (member.doing, member.account) == ("", "worker 0 (pid 12) wrote worker-0.log")


def test_an_empty_log_is_not_named(tmp_path: Path) -> None:
    """After SIGKILL the user was sent to a file without a byte."""
    child, none, log = cast(Any, SimpleNamespace(pid=12)), cast(Any, None), tmp_path / "worker-0.log"
    member = WorkerHandle(0, ((0, 0),), child, none, log)
    log.touch()
    assert member.account == "worker 0 (pid 12) wrote nothing"
    log.write_text("a warning")
    assert member.account == f"worker 0 (pid 12) wrote {log}"

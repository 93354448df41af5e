"""Lanes: a pool of processes that run cases; each lane keeps its fork server warm from case to case.

Rules: a lane gets its next case when it has answered. A lane that exceeds the time limit is ended with all its
children, and its case counts as hung. If a lane ends, its case fails and the next case gets a new lane. The kernel ends
all lanes with this process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from engine.core.message_codec import Plain
from engine.core.process_messages import CaseMessage, DoneMessage
from engine.files.atomic_write import open_to_append
from engine.runtime.ipc.link import Link
from engine.runtime.process import subprocesses
from engine.runtime.process.folder_lock import folder_used
from engine.runtime.process.interrupts import RunInterruptedError, breakable

_GRACE_S = 10.0
_INTERRUPTED_GRACE_S = 1.0

Task = TypeVar("Task", bound=Plain)


class Lane:
    """One process of the pool; it runs `module` with the number of its link's descriptor as the only argument."""

    def __init__(self, module: str, log: Path):
        self._grace_s = _GRACE_S
        command = subprocesses.module("engine.runtime.process.exec_with_parent", str(os.getpid()))
        with open(open_to_append(log), "ab") as file:
            self.link, far = Link.pair()
            command += subprocesses.module(module, str(far.fileno()))
            self._process = subprocesses.start(command, fd=far.fileno(), log=file)
        far.close()

    def ask(self, task: Plain) -> None:
        """Sends a case to the lane, if the lane has not ended."""
        with contextlib.suppress(OSError):
            self.link.send(CaseMessage(task))

    def close(self) -> int:
        """Ends the lane and returns its exit code, negative for a signal; an idle lane ends at once."""
        self.link.close()
        return subprocesses.end(self._process, self._grace_s)

    def interrupt(self, grace_s: float = _GRACE_S) -> None:
        """Sends SIGTERM, on which the running case cleans up within `grace_s`."""
        self._grace_s = grace_s
        self._process.send_signal(signal.SIGTERM)


class Lanes:
    """A pool of `count` lanes, as a context; `logs` is marked as used meanwhile."""

    def __init__(self, module: str, count: int, logs: Path):
        self._module = module
        self._logs = logs
        self._lanes: list[Lane | None] = [None] * count
        self._use = folder_used(logs)

    def __enter__(self) -> Lanes:
        self._use.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lanes = [lane for lane in self._lanes if lane is not None]
        for lane in lanes if kind is not None else ():
            lane.interrupt(_INTERRUPTED_GRACE_S if isinstance(error, RunInterruptedError) else _GRACE_S)
        for lane in lanes:
            lane.close()
        self._use.__exit__(None, None, None)

    def run(self, tasks: Iterable[Task], limit_s: float, take: Callable[[Task, Plain], None]) -> None:
        """Starts the tasks in order, one per free lane; calls `take` with each task and its answer.

        The answer is ``{"result": the lane's}``, or ``{"ended": "hang"}`` if the lane exceeded `limit_s` seconds, or
        ``{"ended": exit code}`` if the lane ended. Raises RunInterruptedError after a signal to this process.
        """
        left = iter(tasks)
        running: dict[int, tuple[Task, float]] = {}
        while True:
            for number in range(len(self._lanes)):
                if number not in running and (task := next(left, None)) is not None:
                    self._lane(number).ask(task)
                    running[number] = (task, time.monotonic() + limit_s)
            if not running:
                return
            for number, answer in self._answers(running):
                take(running.pop(number)[0], answer)

    def _lane(self, number: int) -> Lane:
        lane = self._lanes[number]
        if lane is None:
            lane = self._lanes[number] = Lane(self._module, self._logs / f"lane-{number}.log")
        return lane

    def _answers(self, running: Mapping[int, tuple[Plain, float]]) -> Sequence[tuple[int, Plain]]:
        """Waits for the first answers or the first deadline; returns (lane, answer) of each."""
        with selectors.DefaultSelector() as selector:
            for number in running:
                selector.register(self._lane(number).link, selectors.EVENT_READ, number)
            first_s = min(deadline for _, deadline in running.values())
            with breakable():
                ready = [key.data for key, _ in selector.select(max(0.0, first_s - time.monotonic()))]
        answers: list[tuple[int, Plain]] = []
        for number in ready:
            done = self._lane(number).link.receive()
            answer = {"result": done.result} if isinstance(done, DoneMessage) else {"ended": self._drop(number).close()}
            answers.append((number, answer))
        late = [number for number, (_, at_s) in running.items() if number not in ready and at_s <= time.monotonic()]
        for number in late:
            lane = self._drop(number)
            lane.interrupt()
            lane.close()
            answers.append((number, {"ended": "hang"}))
        return answers

    def _drop(self, number: int) -> Lane:
        lane = self._lane(number)
        self._lanes[number] = None
        return lane

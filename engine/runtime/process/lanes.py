"""Lanes: processes that run one case after another, side by side; each keeps a fork server warm for all its cases.

Rules: a lane gets its next case when it has answered; one that does not answer in time is ended, with all that it has
started, and its case has hung. A lane that ends takes its case with it; the next case gets a new lane. Lanes end with
this process, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from engine.runtime.ipc.link import Link, Message
from engine.runtime.process.interrupts import ctrl_c_held

_GRACE_S = 10.0
_GONE = {"ended": "hang"}


class Lane:
    """One process; `module` is run with the number of its link's descriptor as its only argument."""

    def __init__(self, module: str, log: Path):
        self.link, far = Link.pair()
        command = [sys.executable, "-m", "engine.runtime.process.exec_with_parent", str(os.getpid())]
        command += [sys.executable, "-m", module, str(far.fileno())]
        with ctrl_c_held(), log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        far.close()

    def ask(self, task: Message) -> None:
        """Gives it a case; nothing happens if it has ended."""
        with contextlib.suppress(OSError):
            self.link.send("case", task=task)

    def close(self) -> int:
        """Waits until it has ended, at once if it has nothing to do; returns its exit code, negative for a signal."""
        self.link.close()
        try:
            return self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be beyond SIGKILL
            self._process.wait(_GRACE_S)
        return -signal.SIGKILL

    def interrupt(self) -> None:
        """Asks it to end whatever it does; the case that it runs may clean up."""
        self._process.send_signal(signal.SIGTERM)


class Lanes:
    """Some lanes, as a context."""

    def __init__(self, module: str, count: int, logs: Path):
        self._module = module
        self._logs = logs
        self._lanes: list[Lane | None] = [None] * count

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lanes = [lane for lane in self._lanes if lane is not None]
        for lane in lanes if kind is not None else ():
            lane.interrupt()
        for lane in lanes:
            lane.close()

    def run(self, tasks: Iterable[Message], limit_s: float, take: Callable[[Message, Message], None]) -> None:
        """Runs every task, in order as far as there are lanes; `take` is called with each and its answer.

        The answer of a task whose lane was too slow is ``{"ended": "hang"}``, of one whose lane ended
        ``{"ended": its exit code}``.
        """
        left = iter(tasks)
        running: dict[int, tuple[Message, float]] = {}
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

    def _answers(self, running: dict[int, tuple[Message, float]]) -> Sequence[tuple[int, Message]]:
        """Waits for the first answers, or for the first lane that is too slow."""
        with selectors.DefaultSelector() as selector:
            for number in running:
                selector.register(self._lane(number).link, selectors.EVENT_READ, number)
            first_s = min(deadline for _, deadline in running.values())
            ready = [key.data for key, _ in selector.select(max(0.0, first_s - time.monotonic()))]
        answers: list[tuple[int, Message]] = []
        for number in ready:
            answer = self._lane(number).link.receive()
            answers.append((number, {"ended": self._drop(number).close()} if answer is None else answer))
        late = [number for number, (_, at_s) in running.items() if number not in ready and at_s <= time.monotonic()]
        for number in late:
            lane = self._drop(number)
            lane.interrupt()
            lane.close()
            answers.append((number, dict(_GONE)))
        return answers

    def _drop(self, number: int) -> Lane:
        lane = self._lane(number)
        self._lanes[number] = None
        return lane

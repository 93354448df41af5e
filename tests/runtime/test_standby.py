"""All workers begin again while a coordinator dies: the next one hears of it, and of nothing from before."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from engine.core.job.job import Job
from engine.core.message_codec import Message
from engine.core.messages import ReadyMessage
from engine.core.ownership import Grid, fresh
from engine.core.protocol.coordinator_state import first_state
from engine.core.protocol.events import JobRestart, LeaseExpired, WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput, JobResumption, ProcessExit, RunStopping
from engine.core.protocol.wire import StepMessage, TakeOverMessage
from engine.runtime.agent.standby import CoordinatorGoneError, StandbyCoordinator, _Process
from engine.runtime.ipc.link import Link

JOINS = tuple(WorkerWord(1, worker, ReadyMessage(), "node-0") for worker in range(2))
LIFE: tuple[CoordinatorInput, ...] = (*JOINS, ProcessExit(2, 1, -9), RunStopping(3), ProcessExit(4, 0, -9))


class Dying(StandbyCoordinator):
    """The first coordinator gives no answer to an input of one name; `asked` are the names that the next one hears."""

    def __init__(self, last: str):
        self.last, self.asked = last, list[str]()
        process = MagicMock()
        process.wait.return_value = -9
        state = first_state(Job(stages=2), fresh(Grid(2, 4)), 0)
        super().__init__(lambda name: (process, MagicMock()), {}, "run", MagicMock(), state, MagicMock())

    def _ask(self, *parts: Message) -> tuple[Any, ...]:
        first = parts[0]
        name = first.name if isinstance(first, StepMessage) else type(first).__name__
        if name == self.last:
            self.last, self.asked = "", []
            raise CoordinatorGoneError
        self.asked.append(name)
        return ()


@pytest.mark.parametrize(
    "beginning", [JobRestart(5), JobResumption(5, 3, (0, 1), ((), ()))], ids=["restarted", "resumed"]
)
def test_another_coordinator_hears_of_a_new_beginning_only(beginning: CoordinatorInput) -> None:
    name = type(beginning).__name__
    waits = Dying(last=name)
    for given in (*LIFE, beginning, JOINS[0]):
        waits.handle(given)
    assert waits.asked == ["TakeOverMessage", name, "WorkerWord"]


def test_another_coordinator_hears_of_joins_and_ends() -> None:
    waits = Dying(last="LeaseExpired")
    for given in (*LIFE[:3], LeaseExpired(5, "node-1")):
        waits.handle(given)
    assert waits.asked == ["TakeOverMessage", "WorkerWord", "WorkerWord", "ProcessExit", "LeaseExpired"]


def test_time_in_which_the_agent_stood_still_is_no_silence_of_its_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Link.pair(blocking=True)
    process, looks = _Process(MagicMock(), near, "first"), list[float]()

    def select(*given: Any) -> Any:
        """Each look ends when the whole patience is over by the clock."""
        looks.append(given[-1])
        monkeypatch.setattr("time.monotonic", lambda: 1e9 * len(looks))
        return ([near] if len(looks) == 3 else [], [], [])

    monkeypatch.setattr("select.select", select)
    far.send(TakeOverMessage(True))
    assert process.receive(10.0, lambda: None) == TakeOverMessage(True)
    looks.clear()
    with pytest.raises(CoordinatorGoneError):
        process.receive(2.0, lambda: None)
    assert len(looks) == 2
    near.close()
    far.close()

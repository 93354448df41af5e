"""The coordinator in a process of its own, and a second one that waits: when the first has ended, the second goes on.

    coordinator   ends (SIGKILL)
    agent         its pidfd proves the end: deletes its key in the store; no lease has to expire
    standby       wins the role, reads the state, makes an epoch (TakenOver); training goes on, no worker is restarted
    agent         tells again all ends, joins and notices, and the input whose answer is missing

Rule: outputs are carried out when all outputs of an input have come. Of an input whose answer is missing none was.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import BambooError, CoordinatorUnavailableError, DivergedError, ExitCode, ensure
from engine.core.history.process_records import CoordinatorEndedRecord, CoordinatorRecord
from engine.core.kv import KV, Delete, Txn, equal
from engine.core.message_codec import Message, Plain
from engine.core.protocol import inputs_outputs
from engine.core.protocol import state as membership_state
from engine.core.protocol.coordinator_state import ROLE, CoordinatorState, resume
from engine.core.protocol.events import JobRestart, Notice
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput, Note, Write
from engine.core.protocol.wire import (
    BeginCoordinatorMessage,
    DecidedMessage,
    StepMessage,
    TakeOverMessage,
    is_told_again,
    parts_of,
    read_step,
    sightings_of,
)
from engine.runtime.ipc.clock import now_ns
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.fork_client import Child
from engine.runtime.store.etcd_kv import LEASE_TTL_S
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings

_ANSWER_S = 10.0  # a coordinator without an answer is ended; longer than the deadline of a call to the store
_ROLE_S = LEASE_TTL_S + _ANSWER_S  # the same, of one that takes the role: a key that was not deleted has to expire
_LOOK_EVERY_S = 1.0
_MAX_ATTEMPTS = 4
_END_S = 5.0  # from SIGKILL to the end of its process
Start = Callable[[str], tuple[Child, Link]]


def plain_settings(settings: EtcdSettings, private_logs: Path | None) -> dict[str, Any]:
    """Returns the settings of a client as plain values; of a private etcd the folder of its logs."""
    if private_logs is not None:
        return {"private": str(private_logs)}
    endpoints = [[each.host, each.port] for each in settings.endpoints if isinstance(each, Endpoint)]
    files = [settings.ca_file, settings.cert_file, settings.key_file]
    return {"endpoints": endpoints, "files": files, "user": settings.user, "password": settings.password.reveal()}


class CoordinatorGoneError(Exception):
    """The coordinator has ended, or gives no answer."""


class _Process(NamedTuple):
    child: Child
    link: Link
    name: str

    def receive(self, patience_s: float, while_waiting: Callable[[], None]) -> Message:
        """Returns the next message; calls `while_waiting` each second. Raises CoordinatorGoneError.

        Seconds are counted as looks: while this process stood still, it has not watched the other.
        """
        while not select.select([self.link], [], [], min(_LOOK_EVERY_S, patience_s))[0]:
            patience_s -= _LOOK_EVERY_S
            if patience_s <= 0:
                raise CoordinatorGoneError
            while_waiting()
        message = self.link.receive()
        if message is None:
            raise CoordinatorGoneError
        return message

    def close(self) -> None:
        self.link.close()
        self.child.close()


class StandbyCoordinator:
    """A coordinator and the one that waits; `start` starts a process under a name. It is used as a Coordinator is."""

    def __init__(self, start: Start, store: Plain, run_id: str, kv: KV, first: CoordinatorState, recorder: Recorder):
        self.state = first
        self._start, self._store, self._run_id = start, store, run_id
        self._kv = kv
        self._recorder = recorder
        self._membership = membership_state.to_json(first.membership)
        self._known: list[CoordinatorInput] = []  # what another coordinator must be told
        self._number = 0
        self._is_stopping = False
        self.while_waiting: Callable[[], None] = lambda: None  # called each second in which no answer comes
        self.active = self._started()
        self.waiting: _Process | None = self._started()
        self._ask(TakeOverMessage(True))

    def handle(self, given: CoordinatorInput) -> tuple[CoordinatorOutput, ...]:
        """Returns the outputs of an input; before them those of a take-over, if the coordinator has ended.

        Raises CoordinatorUnavailableError if none is left, and the errors of the machine.
        """
        found: list[CoordinatorOutput] = []
        if isinstance(given, inputs_outputs.RunStopping | JobRestart | inputs_outputs.JobResumption):
            self._is_stopping = isinstance(given, inputs_outputs.RunStopping)
        if isinstance(given, JobRestart | inputs_outputs.JobResumption):  # all that was known is of other processes
            self._known = [each for each in self._known if isinstance(each, Notice) and each.worker is None]
        for attempt in range(_MAX_ATTEMPTS):
            try:
                if attempt:
                    found += self._take_over()
                found += self._ask(*parts_of(given))
                self._known += [given] * is_told_again(given)
                if self.waiting is None and isinstance(given, inputs_outputs.ClockTick):
                    self.waiting = self._started()  # not in a take-over, which it would delay
                return tuple(found)
            except CoordinatorGoneError:
                if self._is_stopping:
                    return ()  # nothing is decided any more
        raise CoordinatorUnavailableError(f"{_MAX_ATTEMPTS} coordinators have ended one after the other")

    def close(self) -> None:
        """Ends both processes."""
        for each in (self.active, self.waiting):
            if each is not None:
                each.close()

    def _started(self) -> _Process:
        self._number += 1
        name = f"{socket.gethostname()}:{os.getpid()}:coordinator-{self._number}"
        child, link = self._start(f"bamboo-coord-{self._number}")
        link.send(BeginCoordinatorMessage(asdict(self.state.job), self._membership, self._store, self._run_id, name))
        self._recorder.write(CoordinatorRecord(child=child.pid))
        return _Process(child, link, name)

    def _ask(self, *parts: Message) -> tuple[CoordinatorOutput, ...]:
        """Returns the outputs of one answer; raises CoordinatorGoneError, or the error of the coordinator."""
        for part in parts:
            if not self.active.link.send(part):
                raise CoordinatorGoneError
        patience_s = _ROLE_S if isinstance(parts[0], TakeOverMessage) else _ANSWER_S
        rest, found = self._received(patience_s), list[CoordinatorOutput]()
        for message in rest:
            if isinstance(message, DecidedMessage):
                if message.error:
                    raise _error(message)
                at_ns = now_ns()
                new = resume(self.state.job, message.documents, at_ns)
                self.state = new._replace(membership=new.membership._replace(sightings=sightings_of(message)))
                break
            ensure(isinstance(message, StepMessage), f"a coordinator answers with outputs, not with {message}")
            found.append(read_step(message, rest))  # type: ignore[arg-type]
        return tuple(found)

    def _received(self, patience_s: float) -> Iterator[Message]:
        while True:
            yield self.active.receive(patience_s, self.while_waiting)

    def _take_over(self) -> list[CoordinatorOutput]:
        """Proves the end of the coordinator, gives its role to the one that waits, and tells that one what is known."""
        ended = self.active
        ended.link.close()
        ended.child.signal(signal.SIGKILL)
        code = ended.child.wait(_END_S)
        if code is None:
            raise CoordinatorUnavailableError(f"the coordinator (pid {ended.child.pid}) does not end by SIGKILL")
        self._recorder.write(CoordinatorEndedRecord(child=ended.child.pid, code=code))
        ended.child.close()
        self._kv.transact(Txn((equal(ROLE, ended.name.encode()),), (Delete(ROLE),)))
        self.active, self.waiting = self.waiting or self._started(), None
        found = [*self._ask(TakeOverMessage(False))]
        for known in self._known:
            told = self._ask(*parts_of(known))
            found += [each for each in told if not (isinstance(known, Notice) and _is_told(each))]
        return found


def _is_told(output: CoordinatorOutput) -> bool:
    return isinstance(output, Write | Note)


def _error(told: DecidedMessage) -> BambooError:
    if told.code == ExitCode.EXPECTATION_FAILED:
        return DivergedError(told.error)
    if told.code == CoordinatorUnavailableError("").exit_code:
        return CoordinatorUnavailableError(told.error)
    return BambooError(told.error, told.code)

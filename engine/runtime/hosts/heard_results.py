"""The results of a run as a host hears them that does not coordinate it: the next one goes on with these.

Rules: each decision has a number, and is heard in the order in which it was recorded, so the results are those of the
host that recorded. The last ones are kept as lines, as many as may wait in a stream: a host that is not lost lacks no
more, so hosts can complete each other at a take-over.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.core.config.job import Job
from engine.core.errors import BambooError, CoordinatorUnavailableError, ensure
from engine.core.faults.taken_faults import ToldFaults
from engine.core.history.process_records import DeadlyRecord, ExitRecord, ResumedRecord, StartedRecord
from engine.core.history.record import AGENT, Record, StampedRecord
from engine.core.history.record_lines import decoded, encoded
from engine.core.history.request_records import RequestRecord
from engine.core.history.run_records import (
    AuditRecord,
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    UnconfirmedRecord,
    ValidationRecord,
)
from engine.core.hosts.unheard import unheard
from engine.core.message_codec import Message, decode, kind_of
from engine.core.messages import AuditMessage, CutMessage, Evaluation
from engine.runtime.agent.run_state import RunState, audit_record
from engine.runtime.hosts.stream_end import MOST_WAITING_BYTES

KEPT = (
    AuditRecord,
    CommitRecord,
    ConfirmedRecord,
    DeadlyRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    RequestRecord,
    ResumedRecord,
    StartedRecord,
    ExitRecord,
    UnconfirmedRecord,
    ValidationRecord,
)  # of these every host hears
_AUDIT = f'{{"kind":"{kind_of(AuditMessage)}"'.encode()


def hashes_of(packet: bytes) -> AuditMessage | None:
    """Returns a control message of a worker that has hashes; None for another one."""
    message: Message | None = decode(packet) if packet.startswith(_AUDIT) else None
    return message if isinstance(message, AuditMessage) else None


class HeardResults:
    """The results of one run, of which this host hears; `count` decisions so far."""

    def __init__(self, job: Job):
        self.results = RunState(job)
        self.faults = ToldFaults()
        self.count = 0
        self._lines: deque[str] = deque()  # the last ones
        self._bytes = 0

    def take(self, number: int, line: str) -> Record | None:
        """Takes the next decision; returns it, or None for one that was heard before."""
        if number < self.count:
            return None
        ensure(number == self.count, f"decision {number} was told where {self.count} comes next")
        record = decoded(line)
        self._keep(line)
        self.hear(record)
        return record

    def _keep(self, line: str) -> None:
        self.count += 1
        self._lines.append(line)
        self._bytes += len(line)
        while self._bytes > MOST_WAITING_BYTES:
            self._bytes -= len(self._lines.popleft())

    @property
    def _first(self) -> int:
        return self.count - len(self._lines)

    def last_since(self, number: int) -> dict[int, str]:
        """Returns the decisions from a number on, as far as they are kept."""
        return {each: line for each, line in enumerate(self._lines, self._first) if each >= number}

    def since(self, number: int) -> dict[int, str]:
        """Returns the decisions from a number on; raises CoordinatorUnavailableError if older ones are needed."""
        if number < self._first:
            raise CoordinatorUnavailableError(f"the decisions {number} to {self._first - 1} are not kept any more")
        return self.last_since(number)

    def complete(self, told: Iterable[Mapping[int, str]]) -> None:
        """Takes what other hosts have heard, and this one has not."""
        for line in unheard(self.count, told):
            self.take(self.count, line)

    def hear(self, record: object) -> None:
        """Takes a decision. Results that contradict each other are for the host that coordinates to judge."""
        self.faults.hear(record)
        found = self.results
        with contextlib.suppress(BambooError):
            match record:
                case ResumedRecord(step=step):
                    self.results = found.again(step) if found.losses else RunState(found.job, step)
                case PartitionRecord(starts=starts, layers=layers, samples=samples):  # of each start of the workers
                    self.results = found = found.again(found.committed)
                    found.cut(CutMessage(starts, layers, samples))
                case AuditRecord(of=worker, step=step, pipeline=pipeline, rows=rows):
                    found.audit(worker, AuditMessage(step, pipeline, tuple((*row, (), ()) for row in rows)))
                case ValidationRecord(step=step, name=name, samples=samples, loss=loss, metrics=metrics):
                    known = [each for each in found.validations.get(step, ()) if each.name != name]
                    found.validations[step] = (*known, Evaluation(name, samples, loss, metrics))
                case KeptRecord(step=step):
                    found.kept = step
                case StampedRecord():
                    found.books(record)

    def hear_again(self, worker: int, packet: bytes) -> None:
        """Takes hashes of a worker that the host which is lost may not have told; raises ReplicasDifferError."""
        message = hashes_of(packet)
        if message is not None and message.step == self.results.committed:
            self.results.audit(worker, message)
            self._keep(encoded(replace(audit_record(worker, message), worker=AGENT)))  # other hosts lack it too

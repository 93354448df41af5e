"""The results of a run as a host hears them that does not coordinate it: the next one goes on with these.

Rule: each decision is heard in the order in which it was recorded, so the results are those of the host that recorded.
"""

from __future__ import annotations

import contextlib

from engine.core.config.job import Job
from engine.core.errors import BambooError
from engine.core.history.process_records import ExitRecord, ResumedRecord, StartedRecord
from engine.core.history.record import StampedRecord
from engine.core.history.run_records import (
    AuditRecord,
    CommitRecord,
    EpochRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    ValidationRecord,
)
from engine.core.message_codec import Message, decode, kind_of
from engine.core.messages import AuditMessage, CutMessage, Evaluation
from engine.runtime.agent.run_state import RunState

KEPT = (
    AuditRecord,
    CommitRecord,
    EpochRecord,
    GoRecord,
    HeirsRecord,
    KeptRecord,
    PartitionRecord,
    PlanRecord,
    PreparedRecord,
    ResumedRecord,
    StartedRecord,
    ExitRecord,
    ValidationRecord,
)  # of these every host hears
_AUDIT = f'{{"kind":"{kind_of(AuditMessage)}"'.encode()


def is_audit(packet: bytes) -> bool:
    """Whether a control message of a worker has hashes."""
    return packet.startswith(_AUDIT)


class HeardResults:
    """The results of one run, of which this host hears."""

    def __init__(self, job: Job):
        self.results = RunState(job)

    def hear(self, record: object) -> None:
        """Takes a decision. Results that contradict each other are for the host that coordinates to judge."""
        found = self.results
        with contextlib.suppress(BambooError):
            match record:
                case ResumedRecord(step=step):
                    found = self.results
                    self.results = found.again(step) if found.losses else RunState(found.job, step)
                case PartitionRecord(starts=starts, layers=layers, samples=samples):
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
        message: Message | None = decode(packet) if is_audit(packet) else None
        if isinstance(message, AuditMessage):
            self.results.audit(worker, message)

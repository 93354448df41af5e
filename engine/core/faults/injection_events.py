"""Inputs and outputs of the machine of fault injection, `injection.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.faults.fault import Fault, RecoveryPhase
from engine.core.faults.fault_kind import Sign
from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.membership.state import State
from engine.core.message_codec import ToWorker


@dataclass(frozen=True, slots=True)
class InjectionInput:
    """One input, with the time of the coordinator's clock and the state of the membership protocol."""

    now_ns: int
    state: State


@dataclass(frozen=True, slots=True)
class FaultsAdded(InjectionInput):
    """Faults were requested while the job runs; their ids are new."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class MomentCame(InjectionInput):
    """A worker has come to the moment of a fault."""

    fault: str


@dataclass(frozen=True, slots=True)
class PhaseBegan(InjectionInput):
    """A phase of the recovery that leads to `epoch` has begun."""

    phase: RecoveryPhase
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanBegins(InjectionInput):
    """The plan of an epoch is about to run; `positions` are the last step and action of each worker."""

    positions: Mapping[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VictimEnded(InjectionInput):
    """The process of a worker has ended; the membership protocol does not know it yet."""

    worker: int
    code: int


@dataclass(frozen=True, slots=True)
class SignSeen(InjectionInput):
    """A sign that a fault has struck a worker; `fault` if the worker has named the fault."""

    worker: int
    sign: Sign
    value: Any
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class VictimSeen(InjectionInput):
    """The answer to `LookAtVictim` for a process that lives: its state as a letter, such as T for a stopped one."""

    worker: int
    letter: str


@dataclass(frozen=True, slots=True)
class TimePassed(InjectionInput):
    """Time has passed; late work may be due."""


@dataclass(frozen=True, slots=True)
class WorkersRestarted(InjectionInput):
    """All processes have ended, and others were started for the same workers."""


@dataclass(frozen=True, slots=True)
class InjectionEnds(InjectionInput):
    """The run has ended: every fault that is not confirmed is recorded."""


@dataclass(frozen=True, slots=True)
class RecordFault:
    """The record is to be on disk before the next output is carried out."""

    record: FaultRecord | ConfirmedRecord | UnconfirmedRecord


@dataclass(frozen=True, slots=True)
class SendSignal:
    """A signal to a worker that lives, by its number."""

    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class LookAtVictim:
    """The state of a worker's process is to be read; `VictimSeen` is the answer."""

    worker: int


@dataclass(frozen=True, slots=True)
class TellOfFault:
    """A message to a worker, or to every worker that lives."""

    message: ToWorker
    worker: int | None = None


InjectionOutput = RecordFault | SendSignal | LookAtVictim | TellOfFault

"""Outputs of the machine of fault injection, `injection.py`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.message_codec import ToWorker


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
    """The state of a worker's process is to be read; `see_state` takes the answer."""

    worker: int


@dataclass(frozen=True, slots=True)
class TellOfFault:
    """A message to a worker, or to every worker that lives."""

    message: ToWorker
    worker: int | None = None


InjectionOutput = RecordFault | SendSignal | LookAtVictim | TellOfFault

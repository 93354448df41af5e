"""The faults of a run that another host has coordinated, as the next one goes on with them.

    struck, confirmed      nothing is left to do; a fault after it can strike
    struck, no sign yet    its sign may still come: a killed worker has ended by now. What a signal ends is struck again
    waits for its moment   strikes as ever, as all hosts have the same faults
    waited with that host  requested there, or a delay had begun there: it never strikes, and counts as unconfirmed

Rule: a host hears of each strike before a victim on it is struck. So a strike of which no host has heard has struck no
worker that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from engine.core.faults.fault import After
from engine.core.faults.fault_kind import AT_ONCE
from engine.core.faults.injection import Moved, Now
from engine.core.faults.injection_state import (
    Injection,
    InjectionOutput,
    LateWork,
    LookAtVictim,
    RecordFault,
    SendSignal,
    StruckFault,
)
from engine.core.history.request_records import RequestRecord
from engine.core.history.run_records import (
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    HeirsRecord,
    UnconfirmedRecord,
)
from engine.core.ownership import Ownership

_Owners = tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]  # the epoch, owners and shadows


@dataclass(slots=True)
class ToldFaults:
    """What a host hears of the faults of a run: the strikes, in which epochs, and the signs."""

    strikes: list[tuple[FaultRecord, _Owners]] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    unconfirmed: set[str] = field(default_factory=set)
    requested: list[str] = field(default_factory=list)
    _owners: _Owners = (0, (), ())

    @property
    def struck(self) -> set[str]:
        """The ids of the faults that have struck."""
        return {each.fault for each, _ in self.strikes}

    def hear(self, record: object) -> None:
        """Takes the next decision; those about other things change nothing."""
        match record:
            case EpochRecord() | HeirsRecord():
                self._owners = record.epoch, record.owners, record.shadows
            case FaultRecord():
                self.strikes.append((record, self._owners))
            case ConfirmedRecord(fault=fault):
                self.confirmed.add(fault)
            case UnconfirmedRecord(fault=fault):
                self.unconfirmed.add(fault)
            case RequestRecord(faults=faults):
                self.requested += faults


def taken_over(old: Injection, now: Now, told: ToldFaults, lost: str, present: Collection[int]) -> Moved:
    """Returns the injection of the next host, and what it does first; `lost` is the name of the host before.

    Of the workers only those that are `present` have a process that may live.
    """
    struck = tuple(_struck(old, told, name) for name in dict.fromkeys(each.fault for each, _ in told.strikes))
    known = [each for each in struck if each is not None]
    names = told.struck
    waiting = tuple(each for each in old.waiting if each.id not in names)
    epochs = {each.fault.id: each.epoch for each in known}
    begun = {each.id for each in waiting if isinstance(each.moment, After) and _has_begun(each.moment, epochs, now)}
    ended = {worker for each in known for worker in each.workers if worker not in present}
    new = old._replace(
        waiting=tuple(each for each in waiting if each.id not in begun),
        struck=tuple(known),
        ended=old.ended | ended,
    )
    outputs = [*_unconfirmed(told, names, begun, lost)]
    for each in known:
        new, more = _again(new, now, each)
        outputs += more
    return new, tuple(outputs)


def _has_begun(moment: After, epochs: Mapping[str, int], now: Now) -> bool:
    """Returns whether the delay of a fault may have begun; `epochs` are those of the strikes."""
    if moment.fault not in epochs:
        return False
    return moment.phase is None or (moment.delay_ns > 0 and now.state.epoch > epochs[moment.fault])


def _struck(old: Injection, told: ToldFaults, name: str) -> StruckFault | None:
    """Returns a fault that has struck as the host before had it; None for one that was requested there."""
    fault = next((each for each in old.waiting if each.id == name), None)
    if fault is None:
        return None
    records = [(each, owners) for each, owners in told.strikes if each.fault == name]
    epoch, owners, shadows = records[0][1]
    victims = tuple((each.of, each.slot) for each, _ in records)
    missing = frozenset(each.of for each, _ in records) if name not in told.confirmed else frozenset[int]()
    kind = old.kinds[fault.do]
    before = Ownership(old.grid, owners, shadows)
    return StruckFault(fault, kind, kind.with_defaults(fault.parameters), epoch, victims, before, missing)


def _unconfirmed(told: ToldFaults, struck: Collection[str], begun: Collection[str], lost: str) -> list[InjectionOutput]:
    """Returns the records of the faults that the lost host alone could have struck, or confirmed."""
    open_ = [each for each in told.requested if each not in (told.confirmed | told.unconfirmed)]
    waited = [*(each for each in open_ if each not in struck), *sorted(begun)]
    how = dict.fromkeys(waited, f"it waited with host {lost}, which was lost")
    how |= {each: f"host {lost}, which had struck it, was lost before its sign" for each in open_ if each in struck}
    return [RecordFault(UnconfirmedRecord(fault=each, how=text)) for each, text in how.items()]


def _again(old: Injection, now: Now, struck: StruckFault) -> Moved:
    """Sends the signals that may not have been sent to victims that live: late ones, and those that end at once."""
    signals = struck.kind.signals(struck.parameters)
    outputs: list[InjectionOutput] = []
    late: list[LateWork] = []
    for worker in struck.workers:
        if worker in old.ended:
            continue
        late += [
            LateWork(now.now_ns + each.after_ns, SendSignal(worker, each.number)) for each in signals if each.after_ns
        ]
        if worker in struck.missing and struck.kind.by == "agent":
            if struck.fault.do in AT_ONCE:
                outputs += [SendSignal(worker, each.number) for each in signals if not each.after_ns]
            outputs.append(LookAtVictim(worker))
    return old._replace(late=(*old.late, *late)), tuple(outputs)

"""Leaving: the way out of each worker that has given notice, said at once, and carried out when its time comes.

Rule: the ways are looked at with each notice and at each tick of the clock. Inside a step a worker hands over only
while training runs; else the next tick looks again.
"""

from __future__ import annotations

from engine.core.coordinator.orders import Decided, Outputs, decide
from engine.core.coordinator.outputs import Note, Write
from engine.core.coordinator.preparation import patient
from engine.core.coordinator.state import CoordinatorState
from engine.core.elastic.way_out import WayOut, departs, has_heirs, until_boundary_ns, way_out
from engine.core.history.process_records import WayOutRecord
from engine.core.history.run_records import StaysRecord
from engine.core.membership.events import Departure, HandOver
from engine.core.membership.state import Phase
from engine.core.membership.verdicts import unable_to_leave
from engine.core.texts import numbered


def says_who_stays(state: CoordinatorState) -> Decided:
    """Returns the state with the leaving workers that no other worker can replace, and says each once.

    One that can be replaced again, because another worker waits, is looked at as any other.
    """
    staying: dict[int, str] = {}
    outputs: Outputs = ()
    for worker, stages in unable_to_leave(state.membership).items():
        slots, grace_s = numbered(state.job.slot_noun, stages), state.graces_ns.get(worker, 0) / 1e9
        text = f"is to leave within {grace_s:g} s, but no other worker can take over {slots}"
        staying[worker] = text
        if state.staying.get(worker) != text:
            outputs = (*outputs, Note(f"worker {worker} {text}"), Write(StaysRecord(of=worker, text=text)))
    return (state._replace(staying=staying) if staying != state.staying else state), outputs


def looks_at_ways(state: CoordinatorState, now_ns: int) -> Decided:
    """Returns the state and the outputs after a look at the time that is left to leaving workers."""
    outputs: Outputs = ()
    for worker in state.membership.leaving:
        until_ns = state.preparation.deadlines_ns.get(worker)
        known = state.membership
        if until_ns is None or worker not in known.members or known.phase is not Phase.RUNNING or known.is_over:
            continue
        event: HandOver | Departure | None = None
        if worker in known.owners and worker not in known.going:
            state, told = _says(state, worker, until_ns - now_ns, now_ns)
            outputs = (*outputs, *told)
            event = HandOver(now_ns, worker) if state.ways.get(worker) is WayOut.INSIDE else None
        elif worker not in known.owners and departs(until_ns - now_ns, state.graces_ns[worker]):
            event = Departure(now_ns, worker)
        if event is not None:
            state, found = decide(state, event)
            outputs = (*outputs, *found)
    return state, outputs


def _says(state: CoordinatorState, worker: int, left_ns: int, now_ns: int) -> Decided:
    """Returns the state with the way out of a worker, and its record and line if it is a new one."""
    known = state.membership
    spent_ns = now_ns - known.committed_ns
    way = way_out(left_ns, spent_ns, known.steps_ns, has_heirs(known, worker))
    if way is state.ways.get(worker) or worker in state.staying:
        return state, ()
    step, rest_s = known.committed + 1, until_boundary_ns(spent_ns, known.steps_ns) / 1e9
    short = f"the next step boundary is about {rest_s:.1f} s away, and {max(0, left_ns) / 1e9:.1f} s are left"
    later = f" or a few later, when the wanted owners hold its {state.job.slot_noun}s"
    is_patient = worker in patient(state.preparation, known, now_ns)
    text = {
        WayOut.BOUNDARY: f"hands over at the boundary after step {step}{later if is_patient else ''}",
        WayOut.INSIDE: f"hands over inside step {step}: {short}",
        WayOut.NONE: f"cannot hand over in time, and its end will be a death: {short}",
    }[way]
    record = WayOutRecord(of=worker, way=way, step=step, text=text)
    return state._replace(ways={**state.ways, worker: way}), (Write(record), Note(f"worker {worker} {text}"))

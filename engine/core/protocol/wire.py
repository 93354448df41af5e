"""The inputs and outputs of a coordinator in a process of its own, as messages between it and the agent.

    agent                      coordinator
    Begin, or TakeOver ----->  wins the role; resumes the state
    an input ------------->    decides, and writes the state to the store
    <---------- each output    which the agent carries out when all have come
    <------------- Decided     the state as far as the agent needs it, or the error

Rule: a message or a record inside an input or output travels as a packet of its own behind it, so that each fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, get_args, get_origin

from engine.core.errors import CoordinatorUnavailableError
from engine.core.history.record_lines import decoded, encoded
from engine.core.message_codec import Message, Plain, message
from engine.core.messages import ReadyMessage, WaitingMessage
from engine.core.protocol import state as membership_state
from engine.core.protocol.coordinator_state import FACTS, STATE, CoordinatorState, documents
from engine.core.protocol.events import HostWord, Loading, Notice, Sight, WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput, Place, ProcessExit
from engine.core.protocol.state import Sighting
from engine.core.protocol.state import to_json as membership_to_json

_KINDS: dict[str, Any] = {
    each.__name__: get_origin(each) or each for of in (CoordinatorInput, CoordinatorOutput) for each in get_args(of)
}
_BEHIND = {
    "WorkerWord": 2,
    "Tell": 1,
    "Write": 0,
    "Fail": 1,
}  # the place of the field that is a packet of its own


@message
class BeginCoordinatorMessage(Message):
    """All that a coordinator needs; it waits for an input or a take-over."""

    job: Plain
    membership: str  # the first state of the membership protocol
    store: Plain  # the settings of the client
    run_id: str
    name: str  # the candidate in the election


@message
class TakeOverMessage(Message):
    """The coordinator takes the role, which is free; it goes on from the store, unless it is the first one."""

    is_first: bool


@message
class StepMessage(Message):
    """An input or an output, by its name; `values` are its fields, without a message or a record."""

    name: str
    values: tuple[Any, ...]


@message
class LineMessage(Message):
    """A record, as a line."""

    line: str


@message
class DecidedMessage(Message):
    """The end of an answer: the state for the agent, or the error with its exit code."""

    documents: Mapping[str, str]
    sightings: Mapping[str, tuple[Any, ...]]
    error: str
    code: int


def parts_of(given: CoordinatorInput | CoordinatorOutput) -> Iterator[Message]:
    """Yields the messages of an input or an output."""
    name = type(given).__name__
    values = list(given if isinstance(given, tuple) else (getattr(given, each.name) for each in fields(given)))
    behind = values.pop(_BEHIND[name]) if name in _BEHIND else None
    yield StepMessage(name, tuple(values))
    if behind is not None:
        yield behind if isinstance(behind, Message) else LineMessage(encoded(behind))


def read_step(first: StepMessage, rest: Iterator[Message]) -> Any:
    """Returns the input or the output that begins with a message; takes the message behind it from `rest`."""
    values = list(first.values)
    match first.name, values:
        case "ClockTick", [now_ns, places, sights, unseen, words]:
            seen = {int(worker): _sight(each) for worker, each in sights.items()}
            values = [now_ns, {int(worker): Place(*at) for worker, at in places.items()}, seen, tuple(unseen)]
            values.append({int(worker): HostWord(*each) for worker, each in words.items()})
        case "ProcessExit", [*known, [*at]]:
            values = [*known, Place(*at)]
        case "Tell", [workers]:
            values = [tuple(workers)]
        case "WantedOwners", [now_ns, owners, why]:
            values = [now_ns, tuple(owners), why]
        case "MemoryShortage", [now_ns, workers]:
            values = [now_ns, {int(worker): why for worker, why in workers.items()}]
        case "JobRestart", [now_ns, shadows]:
            values = [now_ns, tuple(map(tuple, shadows))]
        case "JobResumption", [*known, owners, shadows]:
            values = [*known, tuple(owners), tuple(map(tuple, shadows))]
    if first.name in _BEHIND:
        behind = next(rest)
        values.insert(_BEHIND[first.name], decoded(behind.line) if isinstance(behind, LineMessage) else behind)
    return _KINDS[first.name](*values)


def _sight(values: list[Any]) -> Sight:
    return Sight._make(values)._replace(loading=Loading(values[6]))


def decided(state: CoordinatorState) -> DecidedMessage:
    """Returns the state for the agent: who is in, who owns which slot, and when each worker was heard, and where.

    It comes with each answer, so it grows with the number of workers, and not with that of their pairs.
    """
    known = state.membership
    bare = known._replace(inventories={}, copies={}, digests={})
    facts = documents(state._replace(membership=bare))[FACTS]
    sightings = {str(worker): (seen.heard_ns, seen.since_ns, seen.at) for worker, seen in known.sightings.items()}
    return DecidedMessage({STATE: membership_to_json(bare), FACTS: facts}, sightings, "", 0)


def sightings_of(told: DecidedMessage) -> dict[int, Sighting]:
    """Returns when each worker was heard, and where it was then."""
    return {
        int(worker): Sighting(heard_ns, since_ns, tuple(at))
        for worker, (heard_ns, since_ns, at) in told.sightings.items()
    }


# Who takes over from a coordinator that is lost with its host has to have a process for each worker.
#
# Rules: a worker that the state names, and whose process no host holds, counts as ended: with its host if that is lost.
# Before the first commit all workers begin again, on the hosts that are left: those that are there know too little, and
# no step is lost.

_SAID_ONCE = (ReadyMessage, WaitingMessage)
_KILLED = -9  # the code of a process whose end nothing saw


class ProcessOnHost(NamedTuple):
    """A process of a worker on a host, by its number there; `ended` has its exit code, or is empty."""

    worker: int
    host: str
    number: int
    pid: int
    ended: tuple[int, ...] = ()


def is_told_again(given: CoordinatorInput) -> bool:
    """Whether a coordinator that takes over must be told an input again: each end, join and notice comes once only."""
    return isinstance(given, ProcessExit | Notice) or (
        isinstance(given, WorkerWord) and isinstance(given.message, _SAID_ONCE)
    )


def begins_again(texts: Mapping[str, str], *, has_results: bool) -> bool:
    """Returns whether all workers begin again with the next host; `texts` are the values of the run in the store.

    `has_results`: a step was committed, perhaps one that was lost since.
    """
    if has_results or STATE not in texts or FACTS not in texts:
        return not has_results
    state = membership_state.resume(texts[STATE], 0)
    return state.committed == state.options.begun


def succession(
    texts: Mapping[str, str], held: Mapping[str, Sequence[Sequence[int]]], lost: str, heard: int
) -> tuple[ProcessOnHost, ...]:
    """Returns the processes of a run whose coordinator was on host `lost`; `texts` are its values in the store.

    `held` has of each host that is there the processes: number, worker, pid, and the exit code of one that has ended.
    `heard` is the last commit of which a host that is left has heard; the one after it is in the store. Raises
    CoordinatorUnavailableError for a run whose workers were to begin again after a checkpoint, and for one of whose
    results more is lost.
    """
    if STATE not in texts or FACTS not in texts or not json.loads(texts[FACTS])["started"]:
        raise CoordinatorUnavailableError(
            f"host {lost}, which coordinated the run, is lost before training has gone on"
        )
    state = membership_state.resume(texts[STATE], 0)
    if heard < state.committed - 1:
        why = f"and its results after step {heard} with it: step {state.committed} is committed"
        raise CoordinatorUnavailableError(f"host {lost}, which coordinated the run, is lost, {why}")
    found = {
        worker: ProcessOnHost(worker, host, number, pid, tuple(ended))
        for host, processes in held.items()
        for number, worker, pid, *ended in processes
    }
    for worker in (*state.members, *state.waiting):
        if worker not in found and worker not in state.exited:
            host = state.nodes.get(worker, lost)
            found[worker] = ProcessOnHost(worker, host, -1 - worker, 0, (_KILLED,) if host in held else ())
    return tuple(found[worker] for worker in sorted(found))


def last_number(texts: Mapping[str, str], found: Iterable[ProcessOnHost]) -> int:
    """Returns the greatest number that a worker has or had, also one whose process is gone: a newcomer has none."""
    state = membership_state.resume(texts[STATE], 0)
    known = (*state.members, *state.waiting, *state.out, *state.lost, *state.exited)
    return max((*known, *(each.worker for each in found)))

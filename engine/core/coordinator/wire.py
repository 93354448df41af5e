"""The inputs and outputs of a coordinator in a process of its own, as messages between it and the agent.

    agent                      coordinator
    Begin, or TakeOver ----->  wins the role; resumes the state
    an input ------------->    decides, and writes the state to the store
    <---------- each output    which the agent carries out when all have come
    <------------- Decided     the state as far as the agent needs it, or the error

Rule: a message or a record inside an input or output travels as a packet of its own behind it, so that each fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin

from engine.core.coordinator.inputs import CoordinatorInput, Place
from engine.core.coordinator.outputs import CoordinatorOutput
from engine.core.coordinator.state import FACTS, STATE, CoordinatorState, documents
from engine.core.history.record_lines import decoded, encoded
from engine.core.membership.evidence import HostWord, Loading, Sight
from engine.core.membership.state import Sighting
from engine.core.membership.state import to_json as membership_to_json
from engine.core.message_codec import Message, Plain, message

_KINDS: dict[str, Any] = {
    each.__name__: get_origin(each) or each for of in (CoordinatorInput, CoordinatorOutput) for each in get_args(of)
}
_BEHIND = {"Heard": 2, "Tell": 1, "Write": 0, "Fail": 1}  # the place of the field that travels as a packet of its own


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
        case "Passed", [now_ns, places, sights, unseen, words]:
            seen = {int(worker): _sight(each) for worker, each in sights.items()}
            values = [now_ns, {int(worker): Place(*at) for worker, at in places.items()}, seen, tuple(unseen)]
            values.append({int(worker): HostWord(*each) for worker, each in words.items()})
        case "Ended", [*known, [*at]]:
            values = [*known, Place(*at)]
        case "Tell", [workers]:
            values = [tuple(workers)]
        case "Wanted", [now_ns, owners, why]:
            values = [now_ns, tuple(owners), why]
        case "Cramped", [now_ns, workers]:
            values = [now_ns, {int(worker): why for worker, why in workers.items()}]
        case "Restarted", [now_ns, shadows]:
            values = [now_ns, tuple(map(tuple, shadows))]
        case "Resumed", [*known, owners, shadows]:
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

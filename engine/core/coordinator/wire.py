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
from typing import Any, get_args

from engine.core.coordinator import inputs, outputs
from engine.core.coordinator.inputs import CoordinatorInput, Place
from engine.core.coordinator.outputs import CoordinatorOutput
from engine.core.coordinator.state import FACTS, STATE, CoordinatorState, documents
from engine.core.history.record_lines import decoded, encoded
from engine.core.membership.events import Restarted, TakenOver
from engine.core.membership.evidence import Loading, Sight
from engine.core.membership.state import Sighting
from engine.core.membership.state import to_json as membership_to_json
from engine.core.message_codec import Message, Plain, message

_INPUTS: dict[str, Any] = {each.__name__: each for each in get_args(CoordinatorInput)}
_OUTPUTS: dict[str, Any] = {each.__name__: each for each in get_args(CoordinatorOutput)}


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


def input_parts(given: CoordinatorInput) -> Iterator[Message]:
    """Yields the messages of an input."""
    match given:
        case inputs.Heard():
            yield StepMessage("Heard", (given.now_ns, given.worker, given.node))
            yield given.message
        case inputs.Passed():
            seen = [{str(worker): each for worker, each in found.items()} for found in (given.places, given.sights)]
            yield StepMessage("Passed", (given.now_ns, *seen))
        case Restarted() | TakenOver():
            yield StepMessage(type(given).__name__, (given.now_ns,))
        case _:
            yield StepMessage(type(given).__name__, tuple(given))


def read_input(first: StepMessage, rest: Iterator[Message]) -> CoordinatorInput:
    """Returns the input that begins with a message; takes the messages behind it from `rest`."""
    values = first.values
    if first.name == "Heard":
        return inputs.Heard(values[0], values[1], next(rest), values[2])
    if first.name == "Passed":
        places = {int(worker): Place(*at) for worker, at in values[1].items()}
        return inputs.Passed(values[0], places, {int(worker): _sight(each) for worker, each in values[2].items()})
    if first.name == "Ended":
        return inputs.Ended(values[0], values[1], values[2], None if values[3] is None else Place(*values[3]))
    made: CoordinatorInput = _INPUTS[first.name](*values)
    return made


def _sight(values: list[Any]) -> Sight:
    return Sight._make(values)._replace(loading=Loading(values[6]))


def output_parts(output: CoordinatorOutput) -> Iterator[Message]:
    """Yields the messages of an output."""
    name = type(output).__name__
    match output:
        case outputs.Tell():
            yield StepMessage(name, (output.workers,))
            yield output.message
        case outputs.Write():
            yield StepMessage(name, ())
            yield LineMessage(encoded(output.record))
        case outputs.Fail():
            yield StepMessage(name, (output.worker, output.has_commit))
            yield output.last
        case _:
            yield StepMessage(name, tuple(output))


def read_output(first: StepMessage, rest: Iterator[Message]) -> CoordinatorOutput:
    """Returns the output that begins with a message; takes the messages behind it from `rest`."""
    values: Any = first.values
    match first.name:
        case "Tell":
            return outputs.Tell(tuple(values[0]), next(rest))  # type: ignore[arg-type]
        case "Write":
            line = next(rest)
            return outputs.Write(decoded(line.line))  # type: ignore[attr-defined,arg-type]
        case "Fail":
            return outputs.Fail(values[0], next(rest), values[1])  # type: ignore[arg-type]
    made: CoordinatorOutput = _OUTPUTS[first.name](*values)
    return made


def decided(state: CoordinatorState) -> DecidedMessage:
    """Returns the state for the agent: who is in, who owns which slot, and when each worker was heard."""
    known = state.membership
    bare = known._replace(inventories={}, copies={}, digests={})
    facts = documents(state._replace(membership=bare))[FACTS]
    sightings = {str(worker): tuple(seen[:-1]) for worker, seen in known.sightings.items()}
    return DecidedMessage({STATE: membership_to_json(bare), FACTS: facts}, sightings, "", 0)


def sightings_of(told: DecidedMessage) -> dict[int, Sighting]:
    """Returns when each worker was heard."""
    return {
        int(worker): Sighting(heard_ns, since_ns, tuple(at), *slowest)
        for worker, (heard_ns, since_ns, at, *slowest) in told.sightings.items()
    }

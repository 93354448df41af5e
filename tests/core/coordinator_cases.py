"""Small jobs for the tests of the coordinator: a pipeline of three workers, and inputs that bring it somewhere."""

from __future__ import annotations

from engine.core import messages
from engine.core.history.run_records import StampedRecord
from engine.core.job.job import Job
from engine.core.message_kinds import Message, ToWorker
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage
from engine.core.protocol.coordinator import step
from engine.core.protocol.coordinator_state import CoordinatorState, begin
from engine.core.protocol.events import WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput, ProcessExit, Tell, Write
from tests.core.membership_cases import forming

S = 1_000_000_000
Outputs = tuple[CoordinatorOutput, ...]


def begun(redundant: bool = True, last_step: int = 9, validate_every: int = 0) -> CoordinatorState:
    """Returns the coordinator of three stages on three workers, of which none has joined."""
    redundancy = "eager" if redundant else "none"
    job = Job(model="mlp", stages=3, redundancy=redundancy, validate_every=validate_every, steps=last_step + 1)  # type: ignore[arg-type]
    return begin(job, forming(redundant, last_step), 0)


def heard(worker: int, message: Message, now_ns: int = 5) -> WorkerWord:
    return WorkerWord(now_ns, worker, message, f"node-{worker // 2}")


def given(state: CoordinatorState, *inputs: CoordinatorInput) -> tuple[CoordinatorState, Outputs]:
    """Returns the state after some inputs, and all outputs on the way."""
    outputs: list[CoordinatorOutput] = []
    for each in inputs:
        state, found = step(state, each)
        outputs += found
    return state, tuple(outputs)


def training(**how: int) -> CoordinatorState:
    """Returns that coordinator in epoch 1, before the first commit."""
    return given(begun(**how), *(heard(worker, messages.ReadyMessage()) for worker in range(3)))[0]  # type: ignore[arg-type]


def votes(state: CoordinatorState, now_ns: int = 6, norm: float = 1.0) -> list[WorkerWord]:
    """Returns all votes that the open ballot misses."""
    ballot = state.ballot
    assert ballot is not None
    return [
        heard(
            worker,
            VoteMessage(
                ballot.epoch,
                ballot.step,
                (SlotVote(*slot, (slot[1],), (norm,), 0.5 if slot[1] == state.job.stages - 1 else None),),
            ),
            now_ns,
        )
        for worker, slot in sorted(ballot.missing)
    ]


def committed(state: CoordinatorState, now_ns: int = 6) -> tuple[CoordinatorState, Outputs]:
    """Returns the coordinator after the commit of the open step, and the outputs of the last vote."""
    *others, last = votes(state, now_ns)
    state, outputs = given(state, *others)
    assert outputs == ()
    return step(state, last)


def answers(state: CoordinatorState) -> list[WorkerWord]:
    """Returns the inventories and the plans of all members."""
    known = state.membership
    told: list[Message] = [
        InventoryMessage(known.epoch, "all", ()),
        PlannedMessage(known.epoch, "plan", ()),
    ]
    return [heard(worker, each) for each in told for worker in known.members]


def killed(worker: int, code: int = -9) -> ProcessExit:
    return ProcessExit(7, worker, code)


def told(outputs: Outputs) -> list[ToWorker]:
    """Returns the messages in some outputs."""
    return [each.message for each in outputs if isinstance(each, Tell)]


def written(outputs: Outputs) -> list[StampedRecord]:
    """Returns the records in some outputs."""
    return [each.record for each in outputs if isinstance(each, Write)]

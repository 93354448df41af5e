"""The inputs and outputs of a coordinator travel to another process and come back as they were."""

from __future__ import annotations

import pytest

from engine.core.history.process_records import CutShortRecord
from engine.core.job.job import Job
from engine.core.message_codec import MAX_BYTES, Message, decode, encode
from engine.core.messages import ByeMessage, FailedMessage
from engine.core.ownership import Grid, fresh
from engine.core.program.inventory import InventoryMessage, PlanMessage
from engine.core.protocol import inputs_outputs
from engine.core.protocol.coordinator_state import first_state
from engine.core.protocol.events import (
    Evidence,
    HostWord,
    JobRestart,
    LeaseExpired,
    Loading,
    MemoryShortage,
    Notice,
    Sight,
    WorkerWord,
)
from engine.core.protocol.inputs_outputs import CoordinatorInput, CoordinatorOutput, Place
from engine.core.protocol.state import Counts, Report, Sighting
from engine.core.protocol.wire import DecidedMessage, StepMessage, decided, parts_of, read_step, sightings_of

INPUTS: tuple[CoordinatorInput, ...] = (
    WorkerWord(5, 2, InventoryMessage(3, '{"a": 1}', (0, 2)), "host"),
    Notice(5, 2, 7),
    inputs_outputs.ProcessExit(5, 2, -9),
    inputs_outputs.ProcessExit(5, 2, 1, Place(3, "0F1", is_struck=True)),
    LeaseExpired(5, "host"),
    inputs_outputs.ClockTick(5, {0: Place(3, "0F1"), 3: Place(2, "")}),
    Notice(5, None, 7),
    MemoryShortage(5, {3: "waits on"}),
    inputs_outputs.ClockTick(5, {}, {1: Sight(1, 2, 3, True, 4, 5, Loading.AHEAD, "R", 6, 7)}, (2, 0)),
    inputs_outputs.ClockTick(5, {}, {}, (), {1: HostWord(7, '{"kind":"heartbeat"}'), 2: HostWord(8)}),
    inputs_outputs.RunStopping(5),
    JobRestart(5),
    JobRestart(5, ((1,), (0, 2))),
)
PLAN = PlanMessage(2, 0, (0, 1), (), (0, 1), ((1,), (0,)), ((0, "holds"), (1, "more")))
OUTPUTS: tuple[CoordinatorOutput, ...] = (
    inputs_outputs.Tell((1, 0), PLAN),
    inputs_outputs.Tell((), ByeMessage()),
    inputs_outputs.Write(CutShortRecord(worker=-1, pid=7, at_ns=8, reason="x")),
    inputs_outputs.Kill(1),
    inputs_outputs.Note("a line"),
    inputs_outputs.PhaseReached("plan", 2),
    inputs_outputs.Arm(),
    inputs_outputs.Restart(),
    inputs_outputs.Stop("why", 3, 1),
    inputs_outputs.Stop("why"),
    inputs_outputs.Fail(1, FailedMessage("error", 70), has_commit=True),
    inputs_outputs.Release(""),
)


def travelled(parts: list[Message]) -> tuple[StepMessage, list[Message]]:
    first, *rest = [decode(encode(part)) for part in parts]
    assert isinstance(first, StepMessage)
    return first, rest


@pytest.mark.parametrize("given", INPUTS)
def test_an_input_comes_back(given: CoordinatorInput) -> None:
    first, rest = travelled(list(parts_of(given)))
    assert read_step(first, iter(rest)) == given


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_comes_back(output: CoordinatorOutput) -> None:
    first, rest = travelled(list(parts_of(output)))
    assert read_step(first, iter(rest)) == output


def test_an_answer_to_256_quiet_workers_fits_a_packet() -> None:
    """Each reports its counts with all others; the agent needs them not."""
    workers = range(256)
    counts = {each: tuple(Counts(peer, 10**6, 10**6, 10**6) for peer in workers if peer != each) for each in workers}
    looked = Evidence(Sight(1, 2, 3, True, 10**9, 10**9, Loading.NONE, "S", 10**12, 10**12), 10**15, 10**15, 10**12)
    sightings = {
        each: Sighting(10**15, 10**15, (1, 2, 10**6, False), 10**9, 10**9, looked, Report(1, 10**9, counts[each]))
        for each in workers
    }
    state = first_state(Job(stages=256), fresh(Grid(256, 4)), 0)
    waiting = state.membership._replace(sightings=sightings, nodes={each: f"host-{each}" for each in workers})
    answer = decode(encode(decided(state._replace(membership=waiting))))
    assert isinstance(answer, DecidedMessage)
    assert len(encode(answer)) < MAX_BYTES / 2
    told = sightings_of(answer)
    assert {each: (seen.ages_s(10**15 + 10**9), seen.at) for each, seen in told.items()} == {
        each: (seen.ages_s(10**15 + 10**9), seen.at) for each, seen in sightings.items()
    }
    assert all(seen.loading is Loading.NONE and seen.known_slowest_ns == 0 for seen in told.values())
    looks = inputs_outputs.ClockTick(
        10**15, {each: Place(3, "0F1") for each in workers}, dict.fromkeys(workers, looked.sight)
    )
    assert all(len(encode(part)) < MAX_BYTES / 2 for part in parts_of(looks))

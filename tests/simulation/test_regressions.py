"""Counter-examples that the simulation found in the engine; each case failed before its fix and is replayed here."""

from __future__ import annotations

import pytest

from engine.core.protocol.state import Phase
from tests.simulation.case import MOVE, Case, Fault
from tests.simulation.run import run

# A worker gives notice and hands over, so that it shadows what it owned. At the next boundary `with_shadows` put
# another shadow in its place at once, and the leaver dropped its replica while the new shadow was still being healed.
# When the owner died in that step, the protocol made the leaver, which had held the slot as of the last commit, its
# heir. The leaver had no replica any more, so the job halted with the state lost, although a replica could have been
# kept. Now a leaver keeps its replicas until it has left.
LEAVER_DROPS_ITS_REPLICA = Case(
    stages=4,
    microbatches=1,
    schedule="gpipe",
    faults=(Fault(2, "decided", 3), Fault(3, "COMMIT", 1, "notice", 1)),
)

# All workers were started again, and the coordinator died while it wrote that. The host agent of the simulation did not
# tell the next one what the new workers had said in between, so that it waited for them for ever. The shipped agent
# handles one message after the other, and repeats the one without an answer.
DIES_AT_A_NEW_BEGINNING = Case(
    stages=3,
    microbatches=1,
    pipelines=3,
    schedule="gpipe",
    steps=2,
    seed=21946,
    spread=10,
    faults=(Fault(6, "moment", 3),),
    deaths=(23, 50),
)

# A job without shadows had other wanted owners, so that it sent a replica to one of them. The owner died after that, in
# the same step. The protocol took it for certain that nobody else held the slot, since the job had no shadows, and
# ended the run with the state lost.
DIES_AFTER_ITS_SLOT_WAS_SENT = Case(
    stages=2,
    microbatches=1,
    redundancy="none",
    schedule="gpipe",
    steps=5,
    faults=(Fault(0, "moment", 8, MOVE, 2), Fault(1, "moment", 46)),
)

# What the simulation itself had wrong. A worker was woken by an early transfer inside of its entry into the next group,
# and took the result of a validation before its own part of it. Two short pauses in a row were one long silence.
ENTERS_AND_VALIDATES = Case(
    microbatches=1,
    pipelines=2,
    redundancy="none",
    schedule="gpipe",
    blocks=4,
    validate_every=2,
    keep_every=1,
    seed=12172,
    spread=10,
    waiting=1,
    joining=1,
)
PAUSED_TWICE = Case(
    stages=1,
    microbatches=1,
    schedule="gpipe",
    steps=1,
    faults=(Fault(0, "moment", 4, "pause", 3_744_255), Fault(0, "commit", 1, "pause", 1_425_389)),
)


@pytest.mark.parametrize("case", [ENTERS_AND_VALIDATES, PAUSED_TWICE], ids=["validates", "paused"])
def test_the_simulation_is_right(case: Case) -> None:
    assert run(case).problem == ""


def test_a_replica_of_a_wanted_owner_counts_in_a_job_without_shadows() -> None:
    history = run(DIES_AFTER_ITS_SLOT_WAS_SENT)
    assert (history.problem, history.phase) == ("", Phase.FINISHED)


def test_new_workers_are_heard_when_a_coordinator_dies_at_the_new_beginning() -> None:
    history = run(DIES_AT_A_NEW_BEGINNING)
    assert history.problem == ""
    assert {"another coordinator takes over", "job is started again"} <= set(history.turns)


def test_leaver_holds_what_it_shadows_until_another_does() -> None:
    history = run(LEAVER_DROPS_ITS_REPLICA)
    assert history.problem == ""
    assert len(history.struck) == 2

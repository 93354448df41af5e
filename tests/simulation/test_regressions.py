"""Counter-examples that the simulation found in the engine; each case failed before its fix and is replayed here."""

from __future__ import annotations

from tests.simulation.case import Case, Fault
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


def test_leaver_holds_what_it_shadows_until_another_does() -> None:
    history = run(LEAVER_DROPS_ITS_REPLICA)
    assert history.problem == ""
    assert len(history.struck) == 2

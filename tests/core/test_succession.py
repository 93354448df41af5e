"""The processes of a run whose coordinator is lost: each worker has one, or counts as ended, with its host or alone."""

from __future__ import annotations

import random

import pytest

from engine.codec.documents import documents, resume
from engine.core.errors import CoordinatorUnavailableError
from engine.core.exclusion import Cause, Exclusion
from engine.core.history.run_records import CommitRecord
from engine.core.messages import CommitMessage
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import ExitSeen, LeaseExpired, Takeover
from engine.core.protocol.inputs_outputs import Tell, Write, recorded_first
from engine.core.protocol.membership import step
from engine.core.protocol.state import Phase
from engine.core.protocol.succession import ProcessOnHost, last_number, restarts_all, succession
from tests.core.coordinator_cases import begun, committed, training
from tests.looped import looped

EXCLUDED = Exclusion(6, "was lost", Cause.DEATH)


def trained() -> CoordinatorState:
    """Returns the coordinator of three workers after a commit: 0 and 1 are on node-0, and 2 is on node-1."""
    return committed(training())[0]


def test_every_worker_of_a_host_that_is_there_goes_on() -> None:
    held = {"node-0": ((1, 0, 70), (2, 1, 71)), "node-1": ((1, 2, 72),)}
    assert succession(trained(), held, "node-2", 0) == (
        ProcessOnHost(0, "node-0", 1, 70),
        ProcessOnHost(1, "node-0", 2, 71),
        ProcessOnHost(2, "node-1", 1, 72),
    )


def test_the_workers_of_a_lost_host_have_no_end_of_their_own() -> None:
    found = succession(trained(), {"node-0": ((1, 0, 70), (2, 1, 71))}, "node-1", 0)
    assert found[2] == ProcessOnHost(2, "node-1", -3, 0, ())


def test_a_worker_that_its_host_does_not_hold_any_more_has_ended() -> None:
    found = succession(trained(), {"node-0": ((1, 0, 70, -9),), "node-1": ((1, 2, 72),)}, "node-2", 0)
    assert found[0] == ProcessOnHost(0, "node-0", 1, 70, (-9,))
    assert found[1] == ProcessOnHost(1, "node-0", -2, 0, (-9,))


def test_a_worker_whose_end_is_known_needs_no_process() -> None:
    state = trained()
    membership = step(state.membership, ExitSeen(9, 1, -9))
    found = succession(state._replace(membership=membership), {"node-0": ((1, 0, 70),)}, "node-1", 0)
    assert [each.worker for each in found] == [0, 2]


@pytest.mark.parametrize(
    ("state", "is_so"),
    [(None, True), (begun(), True), (training(), True), (trained(), False)],
    ids=["no state", "before training", "in the first step", "after a commit"],
)
def test_all_workers_begin_again_before_the_first_commit(state: CoordinatorState | None, is_so: bool) -> None:
    assert restarts_all(state, has_results=False) is is_so
    assert not restarts_all(state, has_results=True)


def test_a_run_that_was_to_go_on_after_a_checkpoint_is_not_taken_over() -> None:
    with pytest.raises(CoordinatorUnavailableError, match="host a, which coordinated the run, is lost before"):
        succession(begun(), {}, "a", 0)


@looped("seed", range(300))
def test_a_take_over_and_the_loss_of_the_host_are_two_epochs_with_one_verdict(seed: int) -> None:
    """Whatever each host holds, the state and the processes name the same living workers."""
    chance = random.Random(seed)  # noqa: S311
    state = trained()
    for _ in range(chance.randrange(4)):
        state = committed(state)[0]
    lost = chance.choice(("node-0", "node-1"))
    known = resume(state.job, documents(state), 0).membership
    held = {
        host: tuple(
            (number, worker, 70 + worker) for number, worker in enumerate(known.members) if known.nodes[worker] == host
        )
        for host in {"node-0", "node-1"} - {lost}
    }
    found = succession(state, held, lost, known.committed)
    assert sorted(each.worker for each in found) == sorted(known.members)
    gone = {each.worker for each in found if each.host == lost}
    assert gone == {worker for worker in known.members if known.nodes[worker] == lost}
    after = step(known, Takeover(1))
    after = step(after, LeaseExpired(2, lost))
    assert after.epoch == known.epoch + 2
    assert {out.worker for out in after.verdict} == gone
    assert after.phase in (Phase.FAILING_OVER, Phase.HALTED)
    assert after.committed == known.committed


def test_a_host_that_has_not_heard_of_two_commits_does_not_make_up_results() -> None:
    state = committed(committed(trained())[0])[0]
    held = {"node-0": ((1, 0, 70), (2, 1, 71)), "node-1": ((1, 2, 72),)}
    assert len(succession(state, held, "a", state.membership.committed - 1)) == 3
    with pytest.raises(CoordinatorUnavailableError, match="its results after step 0 with it: step 2 is committed"):
        succession(state, held, "a", 0)


def test_a_host_hears_of_a_commit_before_its_workers_do() -> None:
    """Else a vote for the next step would not prove that the host of the worker has heard of the commit."""
    _, outputs = committed(trained())
    found = [type(getattr(each, "message", getattr(each, "record", None))) for each in recorded_first(outputs)]
    assert found.index(CommitRecord) < found.index(CommitMessage)
    assert sorted(map(str, recorded_first(outputs))) == sorted(map(str, outputs))
    others = [each for each in outputs if not isinstance(each, Tell | Write)]
    assert [each for each in recorded_first(outputs) if not isinstance(each, Tell | Write)] == others


def test_a_newcomer_gets_the_number_of_no_worker_that_was_ever_there() -> None:
    state = trained()
    found = (ProcessOnHost(2, "node-1", 1, 72),)
    assert last_number(state.membership, found) == 2
    assert (
        last_number(state.membership, (*found, ProcessOnHost(5, "node-1", 2, 73))) == 5
    )  # it loads, and nobody knows it yet
    gone = step(state.membership, ExitSeen(9, 1, -9))
    for changed in (
        gone._replace(exited=(1, 6)),
        gone._replace(waiting=(6,)),
        gone._replace(out={6: EXCLUDED}),
        gone._replace(lost={6: EXCLUDED}),
    ):
        assert last_number(changed, found) == 6

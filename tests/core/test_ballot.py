"""The ballot: what a commit says does not depend on the order of votes, not by a bit."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import tracemalloc
from dataclasses import replace

import pytest

from engine.core.errors import InvariantError
from engine.core.ownership import Grid, Ownership, fresh
from engine.core.program import ballot
from engine.core.program.ballot import Ballot, Commit, SlotVote, VoteMessage, clip_factor, layer_norms, open_ballot
from engine.core.protocol.coordinator import first_not_finite
from tests.looped import looped

# Sums of these depend on the order in which they are added.
NORMS = {0: 1.0, 1: 1.0, 2: 1e16, 3: 0.1, 4: 0.2, 5: 0.3}
LOSSES = [1e16, 1.0, -1e16]


EPOCH = 3


def grid(num_pipelines: int, num_stages: int = 2) -> Grid:
    return Grid(num_stages, microbatches=4, pipelines=num_pipelines)


def ballot_of(num_pipelines: int, num_stages: int = 2, clip_norm: float = 0.0, step: int = 0) -> Ballot:
    """Returns a ballot in which each slot has an owner of its own and no shadow."""
    return open_ballot(EPOCH, step, fresh(grid(num_pipelines, num_stages)), clip_norm)


Cast = tuple[int, VoteMessage]  # by a worker


def message(*slots: SlotVote, step: int = 0) -> VoteMessage:
    return VoteMessage(EPOCH, step, slots)


def vote_of(step: int, pipeline: int, stage: int) -> VoteMessage:
    layers = (3 * stage + 2, 3 * stage, 3 * stage + 1)
    norms = tuple(NORMS[layer] for layer in layers)
    return message(SlotVote(pipeline, stage, layers, norms, LOSSES[pipeline] if stage == 1 else None), step=step)


def votes(num_pipelines: int, step: int = 0) -> list[Cast]:
    """Returns the votes of a step of two stages with three layers each, which stand in any order."""
    slots = [(pipeline, stage) for pipeline in range(num_pipelines) for stage in range(2)]
    return [(worker, vote_of(step, *slot)) for worker, slot in enumerate(slots)]


def cast_all(ballot: Ballot, cast: list[Cast]) -> tuple[Ballot, list[Commit | None]]:
    """Returns the ballot after some votes, and the answer to each of them."""
    answers = []
    for vote in cast:
        ballot, answer = ballot.add(*vote)
        answers.append(answer)
    return ballot, answers


def commit_of(ballot: Ballot, cast: list[Cast]) -> Commit:
    """Casts all votes; the last one commits, and no other."""
    answers = cast_all(ballot, cast)[1]
    assert answers[:-1] == [None] * (len(cast) - 1)
    assert answers[-1] is not None
    return answers[-1]


def test_every_order_of_votes_gives_the_same_bits() -> None:
    cast = votes(num_pipelines=2)
    commits = {commit_of(ballot_of(2, clip_norm=1.0), list(order)) for order in itertools.permutations(cast)}
    norm = math.sqrt(((((1.0 + 1.0) + 1e16) + 0.1) + 0.2) + 0.3)
    one, other = (functools.reduce(operator.add, order) for order in (NORMS.values(), reversed(NORMS.values())))
    assert one != other, "sum() of Python 3.12 corrects its roundings"
    assert commits == {Commit(0, (1e16 + 1.0) / 2, norm, 1.0 / norm)}


def test_losses_are_added_in_pipeline_order() -> None:
    commit = commit_of(ballot_of(3), votes(num_pipelines=3)[::-1])
    assert commit.loss == ((1e16 + 1.0) + -1e16) / 3


def test_the_norm_is_of_one_pipeline_as_reduced_gradients_are_equal() -> None:
    cast = votes(num_pipelines=2)
    alone = commit_of(ballot_of(1), votes(num_pipelines=1))
    assert commit_of(ballot_of(2), cast).grad_norm == alone.grad_norm


def test_norms_of_layers_are_in_their_order_and_add_up_to_the_norm() -> None:
    ballot, answers = cast_all(ballot_of(2), votes(num_pipelines=2))
    assert layer_norms(ballot) == tuple((layer, math.sqrt(NORMS[layer])) for layer in range(6))
    assert answers[-1] is not None and answers[-1].grad_norm == math.sqrt(
        functools.reduce(operator.add, NORMS.values())
    )


def test_the_word_of_every_shadow_is_waited_for() -> None:
    ballot = open_ballot(EPOCH, 0, Ownership(grid(1), (0, 1), ((1, 2), (0,))), clip_norm=0.0)
    shadows = [(worker, message(SlotVote(0, stage))) for worker, stage in ((1, 0), (2, 0), (0, 1))]
    ballot, answers = cast_all(ballot, [*shadows[:2], *votes(1)])
    assert answers == [None] * 4
    assert ballot.missing == {(0, (0, 1))}
    assert commit_of(ballot, shadows[2:]) == commit_of(ballot_of(1), votes(1))


def test_a_worker_that_owns_several_slots_votes_for_each() -> None:
    cast = [(5, vote) for _, vote in votes(1)]
    whole = commit_of(ballot_of(1), votes(1))
    ballot = open_ballot(EPOCH, 0, Ownership(grid(1), (5, 5)), 0.0)
    assert commit_of(ballot, cast) == whole
    together = message(*(slot for _, vote in cast for slot in vote.slots))
    assert commit_of(ballot, [(5, together)]) == whole


def test_a_message_with_one_slot_too_many_is_a_bug() -> None:
    with pytest.raises(InvariantError, match=r"worker 0 has no replica of \(0, 1\)"):
        ballot_of(1).add(0, message(SlotVote(0, 0), SlotVote(0, 1)))


def test_in_a_new_epoch_every_vote_is_missing_again() -> None:
    first, last = votes(1)
    ballot, _ = cast_all(ballot_of(1), [first])
    again = open_ballot(EPOCH + 1, 0, ballot.ownership, 0.0)
    assert again.add(*last)[0].missing == again.missing == {(0, (0, 0)), (1, (0, 1))}
    repeated = [(worker, replace(vote, epoch=EPOCH + 1)) for worker, vote in (first, last)]
    assert commit_of(again, repeated) == commit_of(ballot_of(1), votes(1))


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_a_vote_of_another_epoch_means_nothing(epoch: int) -> None:
    first, last = votes(1)
    ballot, answers = cast_all(ballot_of(1), [first, (last[0], replace(last[1], epoch=epoch, step=9))])
    assert answers == [None, None]
    assert ballot.missing == {(1, (0, 1))}
    assert ballot.add(*last)[1] is not None


def test_a_vote_without_a_replica_is_a_bug() -> None:
    with pytest.raises(InvariantError, match=r"worker 1 has no replica of \(0, 0\)"):
        ballot_of(1).add(1, message(SlotVote(0, 0)))


def test_a_slot_that_votes_twice_is_one_slot() -> None:
    first, *rest = votes(1)
    assert commit_of(ballot_of(1), [first, first, first, *rest]).step == 0


def test_the_ballots_of_a_step_take_memory_for_each_vote_once() -> None:
    def bytes_of(stages: int) -> int:
        """Returns the bytes of all ballots of a step."""
        ballots, cast = [ballot_of(1, stages)], [(stage, message(SlotVote(0, stage))) for stage in range(stages - 1)]
        cast_all(ballots[0], cast)  # what is looked up once is not counted
        tracemalloc.start(8)
        try:
            for each in cast:
                ballots.append(ballots[-1].add(*each)[0])
            own = tracemalloc.Filter(True, ballot.__file__, all_frames=True)  # not what other threads do
            return sum(each.size for each in tracemalloc.take_snapshot().filter_traces([own]).statistics("filename"))
        finally:
            tracemalloc.stop()

    assert bytes_of(256) < 5 * bytes_of(64)


@pytest.mark.parametrize("step", [0, 2])
def test_a_vote_for_another_step_is_a_bug(step: int) -> None:
    ballot = ballot_of(1, step=1)
    with pytest.raises(InvariantError, match=f"vote for step {step} while step 1 is open"):
        ballot.add(*votes(1, step)[0])


def test_the_last_stage_votes_with_its_loss() -> None:
    with pytest.raises(InvariantError, match="votes with its loss"):
        ballot_of(1, 1).add(0, message(SlotVote(0, 0, (0,), (1.0,))))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    _, commit = ballot_of(1, 1, clip_norm=1.0).add(0, message(SlotVote(0, 0, (0, 1), (1.0, bad), 0.5)))
    assert commit is not None
    assert not math.isfinite(commit.grad_norm)


def test_a_layer_without_parameters_adds_nothing() -> None:
    _, commit = ballot_of(1, 1, clip_norm=1.0).add(0, message(SlotVote(0, 0, (), (), 0.5)))
    assert commit == Commit(0, 0.5, 0.0, 1.0)


@looped(
    ("norm", "clip_norm", "factor"),
    [(4.0, 1.0, 0.25), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (1e30, 0.0, 1.0), (4.0, 2.0, 0.5)],
)
def test_clipping(norm: float, clip_norm: float, factor: float) -> None:
    assert clip_factor(norm, clip_norm) == factor


def test_a_norm_that_is_not_a_number_clips_nothing() -> None:
    assert clip_factor(math.nan, 1.0) == 1.0


def test_the_layer_in_which_a_backward_first_met_a_gradient_that_is_not_finite_is_the_last_of_those() -> None:
    cast = votes(1)
    assert first_not_finite(cast_all(ballot_of(1), cast)[0]) is None
    (first, vote), last = cast
    (slot,) = vote.slots
    wrong = replace(slot, squared_norms=(math.nan, math.inf, 1.0))  # of the layers 2, 0 and 1
    ballot, _ = cast_all(ballot_of(1), [(first, message(wrong)), last])
    assert first_not_finite(ballot) == 2

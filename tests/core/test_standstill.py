"""Dark edges: a pipeline with links that go silent, and the verdicts on its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from engine.core.exclusion import Cause
from engine.core.protocol.events import StepCommitted, Tick
from engine.core.protocol.membership import step
from engine.core.protocol.state import (
    Counts,
    Options,
    Phase,
    Report,
    State,
    begin,
    dark_edges,
    deadline_ns,
    steps_after,
)
from tests.core.membership_cases import beats, says_ready
from tests.looped import looped

S = 1_000_000_000
_LOOK_NS = S // 4
Cut = Callable[[int, int, int], bool]  # takes sender, receiver and time; returns whether a message is lost or late


class Pipeline:
    """Workers that send each other a forward and a backward a step; steps take `step_ns` while all links work."""

    def __init__(self, cut: Cut, num_workers: int = 4, step_ns: int = S // 33, shadows: bool = True):
        self.cut, self.num_workers, self.step_ns = cut, num_workers, step_ns
        ring = tuple(((stage - 1) % num_workers,) if shadows else () for stage in range(num_workers))
        options = Options(stages=num_workers, redundant=shadows)
        self.state: State = begin(options, tuple(range(num_workers)), ring, 10**6, 0)
        for worker in range(num_workers):
            self.tell(says_ready(0, worker, "node"))
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()
        self.news_ns = dict.fromkeys(range(num_workers), 0)
        self.now_ns = self.step_began_ns = 0
        self.moves = self._plan()

    def tell(self, event: object) -> None:
        self.state = step(self.state, event)  # type: ignore[arg-type]

    def _plan(self) -> list[tuple[int, int]]:
        last = self.num_workers - 1
        return [(each, each + 1) for each in range(last)] + [(each + 1, each) for each in reversed(range(last))]

    def _advance(self) -> None:
        """Runs the step as far as the links let it; each message waits for the one before it."""
        for at, (sender, receiver) in enumerate(self.moves):
            if at + 1 > sum(self.sent.values()):
                self.sent[sender, receiver] += 1
            if self.received[sender, receiver] < self.sent[sender, receiver]:
                if self.cut(sender, receiver, self.now_ns):
                    return
                self.received[sender, receiver] += 1
                self.news_ns[receiver] = self.now_ns
        self.sent.clear()
        self.received.clear()
        if self.now_ns - self.step_began_ns >= self.step_ns:
            self.step_began_ns = self.now_ns
            self.news_ns = dict.fromkeys(self.news_ns, self.now_ns)
            self.tell(StepCommitted(self.now_ns, self.state.epoch, self.state.committed + 1))

    def until(self, end_ns: int) -> int:
        """Returns the time of the first verdict, or `end_ns`."""
        while self.now_ns < end_ns and self.state.phase is Phase.RUNNING and self.state.epoch == 1:
            self.now_ns += min(self.step_ns, _LOOK_NS)
            self._advance()
            if self.now_ns // _LOOK_NS != (self.now_ns - self.step_ns) // _LOOK_NS:
                for worker in range(self.num_workers):
                    self.tell(beats(self.now_ns, worker, 1, self.state.committed + 1, 1, False, self.report(worker)))
                self.tell(Tick(self.now_ns))
        return self.now_ns

    def report(self, worker: int) -> Report | None:
        quiet_ns = self.now_ns - self.news_ns[worker]
        others = [each for each in (worker - 1, worker + 1) if 0 <= each < self.num_workers]
        counts = [Counts(each, self.sent[worker, each], 1, self.received[each, worker]) for each in others]
        return Report(1, quiet_ns, tuple(counts)) if quiet_ns >= _LOOK_NS else None


def silent(*edges: tuple[int, int], begin_ns: int = S, end_ns: int = 10**18) -> Cut:
    """Returns links that are silent for a while, each in one direction."""
    return lambda sender, receiver, now_ns: (sender, receiver) in edges and begin_ns <= now_ns < end_ns


@looped("edges", [[(0, 1)], [(1, 0)], [(1, 2)], [(2, 1)], [(2, 3)], [(3, 2)], [(1, 2), (2, 1)]])
def test_one_end_of_a_silent_edge_is_given_up_within_three_seconds(edges: list[tuple[int, int]]) -> None:
    pipeline = Pipeline(silent(*edges))
    assert pipeline.until(60 * S) <= 4 * S
    (out,) = pipeline.state.verdict
    assert out.cause is Cause.GIVEN_UP
    assert out.worker in edges[0], "a witness is no end of it"


@pytest.mark.parametrize("worker", range(4))
def test_of_a_worker_without_links_an_edge_is_found(worker: int) -> None:
    ends = [(worker, each) for each in range(4)] + [(each, worker) for each in range(4)]
    pipeline = Pipeline(silent(*ends))
    pipeline.until(60 * S)
    assert abs(pipeline.state.verdict[0].worker - worker) <= 1


@pytest.mark.parametrize("edge", [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_a_link_that_heals_in_time_and_one_that_flaps_put_nobody_out(edge: tuple[int, int]) -> None:
    healed = Pipeline(silent(edge, end_ns=2 * S))
    assert healed.until(30 * S) >= 30 * S

    def flaps(sender: int, receiver: int, now_ns: int) -> bool:
        return (sender, receiver) == edge and now_ns % (2 * S) < 3 * S // 2

    assert Pipeline(flaps).until(60 * S) >= 60 * S


def test_slow_steps_have_twenty_of_them() -> None:
    pipeline = Pipeline(silent((1, 2), begin_ns=12 * S), step_ns=S // 2)
    assert 22 * S <= pipeline.until(60 * S) <= 23 * S
    assert deadline_ns((S, 30 * S, S, S, S)) == 20 * S
    assert steps_after(tuple(range(10)), 10) == tuple(range(1, 11))


def test_without_heirs_the_group_is_formed_again() -> None:
    pipeline = Pipeline(silent((1, 2)), shadows=False)
    assert pipeline.until(60 * S) <= 4 * S
    assert (pipeline.state.verdict, pipeline.state.members) == ((), (0, 1, 2, 3))


def test_no_edge_is_dark_while_a_worker_does_not_report() -> None:
    counts = {0: Report(1, 3 * S, (Counts(1, 1, 0, 0),)), 1: Report(1, 3 * S, (Counts(0, 0, 1, 0),))}
    assert dark_edges(counts, 1, 2 * S) == ((1, 0),)
    assert dark_edges({**counts, 2: None}, 1, 2 * S) == ()
    assert dark_edges({**counts, 2: Report(1, S, ())}, 1, 2 * S) == ()
    assert dark_edges(counts, 2, 2 * S) == (), "they are about another epoch"
    unposted = {**counts, 1: Report(1, 3 * S, (Counts(0, 0, 0, 0),))}
    assert dark_edges(unposted, 1, 2 * S) == (), "it is not expected yet"

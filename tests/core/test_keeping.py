"""Which commits are kept, which worker writes each stage, and which checkpoints may go."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine.core.checkpoint_rules import KeepRule, StateShare, keeping_of, may_go, shares_of, writers
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows

MINUTE_NS = 60 * 10**9


@pytest.mark.parametrize(
    ("text", "keeping"),
    [
        ("100", KeepRule(every_steps=100)),
        ("10m", KeepRule(every_ns=10 * MINUTE_NS)),
        (" end ", KeepRule()),
        ("0", KeepRule(last=False)),
        ("0s", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("\u0661", None),
        ("often", None),
    ],
)
def test_a_rule_is_spelled_in_one_word(text: str, keeping: KeepRule | None) -> None:
    assert keeping_of(text) == keeping


@pytest.mark.parametrize(
    ("text", "kept"), [("3", [2, 5, 8, 9]), ("end", [9]), ("0", []), ("1", [*range(10)]), ("90s", [1, 3, 5, 7, 9])]
)
def test_commits_are_kept_by_steps_by_time_and_at_the_end(text: str, kept: list[int]) -> None:
    keeping = keeping_of(text)
    assert keeping is not None
    found, before_ns = [], 0
    for step in range(10):  # each takes a minute
        now_ns = (step + 1) * MINUTE_NS
        if keeping.is_kept(step, step == 9, now_ns - before_ns):
            before_ns = now_ns
            found.append(step)
    assert found == kept


@pytest.mark.parametrize("redundancy", ["none", "lazy", "eager", "reroute"])
def test_each_stage_is_written_once_by_a_worker_that_holds_it(redundancy: Redundancy) -> None:
    for stages, pipelines, level in itertools.product((1, 2, 4, 8), (1, 2, 3), (1, 2)):
        plain = fresh(Grid(stages, 4, pipelines))
        ownership = with_shadows(plain, redundancy, level, plain.workers())
        chosen = writers(ownership)
        assert list(chosen) == list(range(stages))
        for stage, (writer,) in chosen.items():
            holders = {each for pipeline in range(pipelines) for each in ownership.replicas(pipeline, stage)}
            assert writer in holders
            shadows = holders - set(ownership.owners_of(stage))
            assert not shadows or writer in shadows
        counts = [sum(writer == worker for (writer,) in chosen.values()) for worker in ownership.workers()]
        most = -(-stages // len(counts)) if redundancy != "none" else -(-stages // len(set(plain.owners)))
        assert max(counts) <= max(1, most)


def test_pipelines_share_the_work() -> None:
    assert writers(fresh(Grid(4, 4, 2))) == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    both = fresh(Grid(4, 4, 2), stages_per_worker=4)
    assert sorted(writers(both).values()) == [(0,), (0,), (1,), (1,)]


def test_a_replica_of_each_shard_writes_it() -> None:
    ownership = fresh(Grid(2, 4, 3, fsdp=1))
    assert writers(ownership) == {0: (0, 2, 4), 1: (1, 3, 5)}
    shadowed = replace(ownership, shadows=((1,), (0,), (3,), (), (5, 1), (4,)))
    assert writers(shadowed) == {0: (1, 3, 5), 1: (0, 3, 4)}
    heirs = replace(shadowed, owners=(0, 0, 2, 3, 4, 5), shadows=((),) * 6)
    assert shares_of(heirs, 0) == (StateShare((0, 0), 0, 3), StateShare((0, 1), 0, 3))
    both = Ownership(Grid(1, 4, 2, fsdp=1), (0, 0))
    assert shares_of(both, 0) == (StateShare((0, 0), 0, 2), StateShare((1, 0), 1, 2))


def test_old_ones_go_but_never_the_newest_good_one_or_one_in_use() -> None:
    every = range(6)
    assert may_go(every, 2, every) == (0, 1, 2, 3)
    assert may_go(every, 2, every, in_use=[1]) == (0, 2, 3)
    assert may_go(every, 1, [0, 3]) == (0, 1, 2)
    assert may_go(every, 2, [0, 3]) == ()
    assert may_go(every, 0, [4]) == (0, 1, 2, 3)
    assert may_go(every, 3, []) == ()

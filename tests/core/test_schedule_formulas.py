"""The dry run of every schedule meets the formulas of the literature exactly: waiting time, memory, length.

P workers, M microbatches, V stages per worker. Forward 1, backward 2, each part of it 1; what a worker waits is counted
between its first and its last action, and the most of all workers is taken, as the literature does. Here a part of the
grid meets them by a rule of its own, and a smaller part by the dry run; `make soak-formulas` has the dry run do it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from engine.core.action import Op
from engine.core.ownership import Grid, directions_of, fresh, worker_of
from engine.core.program.dry_run import dry_run, peak_stash, unit_costs
from engine.core.program.owners import on_owners
from engine.core.program.passes import with_transfers
from engine.core.program.schedules import SCHEDULES, Schedule
from tests.core.passing_time import passed
from tests.looped import looped

FORWARD, BACKWARD = 1, 2
WORKERS = (2, 3, 4, 5, 6, 7, 8, 11, 16)  # of the part
# Schedules with pairs have the lists of another one.
LISTS = [name for name, schedule in SCHEDULES.items() if not schedule.overlaps and directions_of(name) == 1]


def late(num_workers: int, num_microbatches: int) -> int:
    """How many microbatches are missing to fill all workers at once."""
    return max(0, num_workers - num_microbatches)


def fills_and_drains(p: int, v: int, m: int) -> int:
    """(P-1)(F+B); every further turn of fewer than P microbatches waits for the rest of the way round."""
    return (p - 1 + (v - 1) * late(p, m)) * (FORWARD + BACKWARD)


WAITS: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": fills_and_drains,
    "1f1b": fills_and_drains,
    "eager-1f1b": fills_and_drains,
    "interleaved": fills_and_drains,
    "interleaved-flexible": fills_and_drains,
    "looped-bfs": fills_and_drains,
    # (P-1)(F+B-2W); in further turns of fewer than P, a W of each microbatch fills what the gradients wait
    "zb1p": lambda p, v, m: p - 1 + v * late(p, m) + (v - 1) * max(0, late(p, m) - m),
    "zb2p": lambda p, v, m: late(2 * p - 1, m),  # none
    "v-min": lambda p, v, m: 4 * p - (5 if p % 3 else 4),  # about 2/3 of 1F1B's, whose stages are twice as long
    "v-half": lambda p, v, m: (7 * p - 8) // 2,  # about 7/12
    "zbv": lambda p, v, m: 2 * late(2 * p - 1, m),  # none
    "dualpipev": lambda p, v, m: p - 1,
}


def megatron_stash(longest: int, p: int, v: int, m: int, worker: int) -> int:
    """The warm-up of rounds of microbatches, and the forward that comes before the first backward."""
    return min(v * m, (v - 1) * longest + 2 * (p - 1 - worker) + 1) if v > 1 else min(m, p - worker)


STASH: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, v, m, worker: m,
    "1f1b": lambda p, v, m, worker: min(m, p - worker),
    "eager-1f1b": lambda p, v, m, worker: min(m, 2 * (p - worker) - 1),
    "interleaved": lambda p, v, m, worker: megatron_stash(p + m % p if m > p else m, p, v, m, worker),
    "interleaved-flexible": lambda p, v, m, worker: megatron_stash(-(-m // max(1, m // p)), p, v, m, worker),
    "looped-bfs": lambda p, v, m, worker: v * m,
    "zb1p": lambda p, v, m, worker: min(v * m, (v - 1) * -(-m // max(1, m // p)) + p),
    "zb2p": lambda p, v, m, worker: min(m, 2 * p - 1),
    # Of two half stages per worker: 2P are as much as P whole ones, so these are P / 3 and P / 2.
    "v-min": lambda p, v, m, worker: 2 * ((p + 4) // 3),
    "v-half": lambda p, v, m, worker: p + 2 - p % 2,
    # Of two half stages per worker: 2P are as much as P whole ones; DualPipeV holds one more.
    "zbv": lambda p, v, m, worker: 2 * p,
    "dualpipev": lambda p, v, m, worker: 2 * p + 1,
}


def stash_is_exact(name: str, p: int, v: int, m: int) -> bool:
    """Says whether the formula is met, not only a bound: a V holds less at its turn, as a shorter round does."""
    return not name.startswith(("zbv", "dualpipev", "v-")) and (v == 1 or m % p == 0)


def shapes(
    schedule: Schedule, microbatches: range = range(1, 65), workers: Sequence[int] = range(2, 17)
) -> Iterator[tuple[int, int, int]]:
    least, most = schedule.stages_per_worker
    for p in workers:
        for v in range(least, min(4, most) + 1):
            yield from ((p, v, m) for m in microbatches if m >= schedule.least_microbatches(p))


def disagreement(
    name: str, shape: tuple[int, int, int], waits: Sequence[float], stash: Sequence[int], length: float
) -> str | None:
    """Returns which formula is not met by what each worker waits and stashes and by the length; None if all are."""
    p, v, m = shape
    most_stash = [STASH[name](p, v, m, worker) for worker in range(p)]
    if max(waits) != WAITS[name](p, v, m) and not (name == "v-half" and m < p):  # which is longer for a few
        return f"{name} P={p} V={v} M={m}: waits {max(waits)}, not {WAITS[name](p, v, m)}"
    within = all(found <= most for found, most in zip(stash, most_stash, strict=True))
    if not within or (stash_is_exact(name, p, v, m) and list(stash) != most_stash):
        return f"{name} P={p} V={v} M={m}: stashes {stash}, not {most_stash}"
    if WAITS[name] is fills_and_drains and length != v * m * (FORWARD + BACKWARD) + WAITS[name](p, v, m):
        return f"{name} P={p} V={v} M={m}: takes {length}"
    return None


def in_sample(p: int, m: int) -> bool:
    """Says whether a shape is tried: each remainder of M by P, in no, one and two rounds; every sixth of many rounds.

    Of more than eight workers every third of few rounds, and those about whole ones.
    """
    if m > 2 * p + 1:
        return m % 11 in (0, 9)  # 64 is in it
    return p <= 8 or m % 3 == 0 or m in (p - 1, p, p + 1, 2 * p + 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LISTS)
def test_waiting_and_memory_are_what_the_literature_says(name: str) -> None:
    schedule = SCHEDULES[name]
    for p, v, m in shapes(schedule, workers=WORKERS):
        if not in_sample(p, m):
            continue
        if name == "interleaved-flexible" and (v == 1 or m % p == 0):
            continue  # the same as interleaved
        lists = schedule(p, m, v)
        waits, length = passed(lists, unit_costs)
        assert disagreement(name, (p, v, m), waits, [peak_stash(line) for line in lists], length) is None


@pytest.mark.parametrize(("name", "part"), [("v-min", 0.40), ("v-half", 0.55)])
def test_twenty_workers_stash_at_most_a_part_of_what_1f1b_does(name: str, part: float) -> None:
    """Of half stages: two residuals are as much as one of a whole stage."""
    whole = max(map(peak_stash, SCHEDULES["1f1b"](20, 40, 1)))
    assert max(map(peak_stash, SCHEDULES[name](20, 40, 2))) / 2 <= part * whole


@looped("name", LISTS)
def test_the_dry_run_says_the_same(name: str) -> None:
    schedule = SCHEDULES[name]
    for p, v, m in [each for each in shapes(schedule) if each[0] in (2, 3, 5, 8) and each[2] in (1, 2, 3, 8, 17, 20)]:
        ownership = fresh(Grid(p * v, m), v, schedule.placement)
        lists = schedule(p, m, v)
        run = dry_run(with_transfers(on_owners(lists, ownership), ownership), ownership)
        waits, length = passed(lists, unit_costs)
        assert (list(run.waits.values()), run.makespan) == (waits, length)


@looped("name", LISTS)
def test_every_microbatch_goes_forward_and_back_once_and_in_order(name: str) -> None:
    schedule = SCHEDULES[name]
    for p, v, m in shapes(schedule, range(1, 65, 7), WORKERS):
        lines = schedule(p, m, v)
        assert len(lines) == p
        for worker, line in enumerate(lines):
            stages = [stage for stage in range(p * v) if worker_of(stage, p, schedule.placement) == worker]
            for stage in stages:
                for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W)):
                    found = [each.microbatch for each in line if each.stage == stage and each.op in ops]
                    assert found == list(range(m))
            assert sorted({action.stage for action in line}) == stages
            assert len({*line}) == len(line)


@pytest.mark.parametrize("workers", [2, 4, 6, 8, 16])
def test_two_directions_wait_and_stash_half_as_much_as_the_zero_bubble_of_one(workers: int) -> None:
    """Both directions together have 2M microbatches, and P + 1 of their residuals are on each worker."""
    schedule = SCHEDULES["dualpipe"]
    for microbatches in (workers, workers + 3, 3 * workers):
        grid = Grid(workers, microbatches, 2)
        ownership, lists = fresh(grid, directions=2), schedule(workers, microbatches)
        run = dry_run(with_transfers(on_owners(lists, ownership), ownership), ownership)
        assert max(run.waits.values()) == workers // 2 - 1
        assert run.makespan == 2 * microbatches * (FORWARD + BACKWARD) + workers // 2 - 1
        assert {peak_stash(line) for line in lists} == {workers + 1}
        for worker, line in enumerate(lists):
            assert {(each.pipeline, each.stage) for each in line} == {*ownership.slots_of(worker)}
            for slot in ownership.slots_of(worker):
                for ops in ((Op.F,), (Op.B, Op.I), (Op.B, Op.W)):
                    order = [each.microbatch for each in line if (each.pipeline, each.stage) == slot and each.op in ops]
                    assert order == list(range(microbatches))

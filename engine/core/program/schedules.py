"""The built-in schedules: the compute actions of each worker in order, one generator each, and their registry."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, permutations
from typing import Literal

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, OP_TABLE, RECEIVE_OPS, SEND_OPS, Action, Op, Work, make_action
from engine.core.errors import ensure
from engine.core.ownership import Placement

# Compute lists: the result of a schedule generator.
#
# List n holds the compute actions of the n-th worker of a pipeline, in order. On every stage the forwards run in
# microbatch order, and so do the backwards, whole or split. Gradients are therefore added in the same order with every
# schedule, and the schedule does not change the bits of a result. A generator makes one list and looks at no other: a
# worker of a thousand makes its own and those of its neighbours.

ComputeList = tuple[Action, ...]
ComputeLists = tuple[ComputeList, ...]
Generator = Callable[[int, int, int, int], ComputeList]  # (worker w, workers P, stages per worker V, microbatches M)


def in_blocks(line: ComputeList, blocks: int) -> ComputeList:
    """Returns a list with each action of a stage as those of its blocks, backwards in reverse; its time is the same."""
    if blocks == 1:
        return line
    return in_runs(line, lambda action: range(action.stage * blocks, (action.stage + 1) * blocks))


def in_runs(line: ComputeList, run_of: Callable[[Action], range]) -> ComputeList:
    """Returns a list with each action of a stage as those of a run of blocks, which is the stage for now."""
    return tuple(
        action._replace(stage=block)
        for action in line
        for block in (run_of(action) if action.op in FORWARD_OPS else reversed(run_of(action)))
    )


def in_slices(line: ComputeList, slices: int) -> ComputeList:
    """Returns a list for microbatches of `slices` slices, made of one for `slices` - 1 more microbatches.

    Seq1F1B (arXiv 2406.03488): the backward of the last slice of a microbatch comes first, so every backward comes
    `slices` - 1 forwards later. These forwards have no backward, and the first backwards of the list have no forward.
    """
    later = slices - 1
    most = max((action.microbatch for action in line), default=0) - later
    moved = (each if each.op in FORWARD_OPS else each._replace(microbatch=each.microbatch - later) for each in line)
    return tuple(action for action in moved if 0 <= action.microbatch <= most) if later else line


class WorkerList:
    """Builder of the list of one worker: each action takes the next microbatch of its stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._taken: dict[tuple[int, Op], int] = {}

    def num(self, stage: int, op: Op) -> int:
        """Returns the number of microbatches of a stage to which an op was applied."""
        return self._taken.get((stage, op), 0)

    def add(self, stage: int, *ops: Op) -> None:
        """Adds ops of a stage, each on its next microbatch; a whole backward (B) counts as I and as W."""
        for op in ops:
            counted = Op.I if op is Op.B else op
            microbatch = self.num(stage, counted)
            self.actions.append(make_action(stage, op, microbatch))
            self._taken[stage, counted] = microbatch + 1
            if op is Op.B:
                self._taken[stage, Op.W] = self.num(stage, Op.W) + 1


# Schedules of one stage per worker: GPipe, 1F1B and eager-1F1B.
#
# They differ in the number of forwards that stand before the pairs of a forward and a backward: all of them, one for
# each stage behind this one, or two. With P = 3 and M = 4, if a backward takes twice the time of a forward:
#
# GPipe     worker 0  0F0 0F1 0F2 0F3                         0B0 -   0B1 -   0B2 -   0B3 -
#           worker 1      1F0 1F1 1F2 1F3             1B0 -   1B1 -   1B2 -   1B3 -
#           worker 2          2F0 2F1 2F2 2F3 2B0 -   2B1 -   2B2 -   2B3 -
#
# 1F1B      worker 0  0F0 0F1 0F2                 0B0 -   0F3 0B1 -       0B2 -       0B3 -
#           worker 1      1F0 1F1         1B0 -   1F2 1B1 -   1F3 1B2 -       1B3 -
#           worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -
#
# eager     worker 0  0F0 0F1 0F2 0F3             0B0 -       0B1 -       0B2 -       0B3 -
#           worker 1      1F0 1F1 1F2     1B0 -   1F3 1B1 -       1B2 -       1B3 -
#           worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -
#
# In 1F1B a value is used as soon as it is made, so the time of a transfer comes on top, twice for each hop in a round
# of P microbatches. Eager-1F1B has one more microbatch under way for each hop. A transfer that takes up to (F + B) / 2
# then delays the fill and the drain, and nothing between them.


def gpipe(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns GPipe: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return _warm_up_then_pairs(worker, num_microbatches, num_microbatches)


def one_f_one_b(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns 1F1B: stage s holds at most P - s residuals (Narayanan et al., PipeDream-Flush, ICML 2021)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return _warm_up_then_pairs(worker, num_workers - worker - 1, num_microbatches)


def eager_one_f_one_b(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns eager 1F1B: stage s holds at most 2 (P - s) - 1 residuals (Zhuang et al., MLSys 2023, section 4)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return _warm_up_then_pairs(worker, 2 * (num_workers - worker - 1), num_microbatches)


def _warm_up_then_pairs(stage: int, num_warm_up: int, num_microbatches: int) -> ComputeList:
    """Returns `num_warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    num_warm_up = min(num_warm_up, num_microbatches)
    forwards = [make_action(stage, Op.F, microbatch) for microbatch in range(num_microbatches)]
    backwards = [make_action(stage, Op.B, microbatch) for microbatch in range(num_microbatches)]
    pairs = zip(forwards[num_warm_up:], backwards, strict=False)
    return (*forwards[:num_warm_up], *chain.from_iterable(pairs), *backwards[num_microbatches - num_warm_up :])


# Schedules with several stages per worker: interleaved 1F1B, its flexible form, and breadth-first.
#
# Interleaved schedules take the microbatches in rounds: a worker runs a round on one of its stages, then on the next.
# After a warm-up it alternates forwards and backwards. The warm-up of the last worker lasts until its first backward
# can start; each worker before it has two forwards more, the time of one activation down and one gradient up.
# P = V = 2, M = 4:
#
#    worker 0  0F0 0F1 2F0 2F1 0F2     2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -       2B2 -       2B3 -   0B2 -   0B3 -
#    worker 1      1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -


def interleaved(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns interleaved 1F1B in rounds of P microbatches (Narayanan et al., Megatron-LM, SC 2021).

    The last round also takes the remainder: in a round of fewer than P, a worker would wait for its own previous stage.
    """
    num_rounds = max(1, num_microbatches // num_workers)
    rest = num_microbatches - num_workers * (num_rounds - 1)
    return _interleaved(worker, num_workers, stages_per_worker, [num_workers] * (num_rounds - 1) + [rest])


def interleaved_flexible(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns interleaved 1F1B in M // P rounds of nearly equal size; torch's rounds where their number divides M."""
    return _interleaved(worker, num_workers, stages_per_worker, _equal_rounds(num_workers, num_microbatches))


def _equal_rounds(num_workers: int, num_microbatches: int) -> list[int]:
    num_rounds = max(1, num_microbatches // num_workers)
    size, rest = divmod(num_microbatches, num_rounds)
    return [size + 1] * rest + [size] * (num_rounds - rest)


def looped_bfs(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns breadth-first: all forwards, stage by stage, then all backwards (Lamy-Poirier, MLSys 2023)."""
    every = range(num_microbatches)
    stages = range(worker, num_workers * stages_per_worker, num_workers)
    forwards = [make_action(stage, Op.F, each) for stage in stages for each in every]
    return (*forwards, *(make_action(stage, Op.B, each) for stage in reversed(stages) for each in every))


def _interleaved(worker: int, num_workers: int, stages_per_worker: int, rounds: list[int]) -> ComputeList:
    if stages_per_worker == 1:
        return one_f_one_b(worker, num_workers, 1, sum(rounds))  # which has a shorter warm-up
    stages = range(worker, num_workers * stages_per_worker, num_workers)
    forwards = [make_action(stage, Op.F, each) for stage, each in _by_round(rounds, stages)]
    backwards = [make_action(stage, Op.B, each) for stage, each in _by_round(rounds, stages[::-1])]
    num_warm_up = min(_ahead(forwards, backwards) + 2 * (num_workers - 1 - worker), len(forwards))
    pairs = zip(forwards[num_warm_up:], backwards, strict=False)
    left = backwards[len(forwards) - num_warm_up :]
    return (*forwards[:num_warm_up], *chain.from_iterable(pairs), *left)


def _ahead(forwards: Sequence[Action], backwards: Sequence[Action]) -> int:
    """Returns how many forwards must come before the pairs, so that none comes after its own backward."""
    place = {(stage, each): number for number, (stage, _, each, _) in enumerate(forwards)}
    return max(place[stage, each] - number for number, (stage, _, each, _) in enumerate(backwards))


def _by_round(rounds: list[int], stages: range) -> list[tuple[int, int]]:
    """Returns the (stage, microbatch) pairs round by round, and within a round stage by stage."""
    pairs, first = [], 0
    for size in rounds:
        pairs += [(stage, each) for stage in stages for each in range(first, first + size)]
        first += size
    return pairs


# Zero-bubble schedules: they split the backward, and the part for the weights, which has no successor, fills bubbles.
#
# ZB1P has the memory of 1F1B, ZB2P nearly twice that. ZBV has two stages per worker, placed as a V. ZB2P and ZBV have
# no bubble if forward, backward for the input and backward for the weights cost the same and M >= 2P - 1. ZB1P with P =
# 3, M = 4:
#
#     worker 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
#     worker 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
#     worker 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3


def zb1p(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns ZB-H1: 1F1B in which W of worker w lags w backwards behind I (Qi et al., ICLR 2024, section 2.2).

    With several stages per worker it has the rounds of flexible interleaved 1F1B. The warm-up is shorter than there by
    one forward for each worker behind this one: the gradient comes up in the time of I, without that of W.
    """
    return _zero_bubble(1, worker, num_workers, stages_per_worker, num_microbatches)


def zb2p(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns ZB-H2: no worker waits if F = I = W and M >= 2P - 1, for 2P - 1 residuals (Qi et al., ICLR 2024, 2.3)."""
    ensure(stages_per_worker == 1, f"one stage per worker, not {stages_per_worker}")
    return _zero_bubble(2, worker, num_workers, 1, num_microbatches)


def _zero_bubble(
    lead: int, worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int
) -> ComputeList:
    """Returns 1F1B with `lead` more forwards for each worker behind, and W later by `lead` for each worker before."""
    stages = range(worker, num_workers * stages_per_worker, num_workers)
    rounds = _equal_rounds(num_workers, num_microbatches)
    forwards, inputs, weights = (
        [make_action(stage, op, each) for stage, each in _by_round(rounds, order)]
        for op, order in ((Op.F, stages), (Op.I, stages[::-1]), (Op.W, stages[::-1]))
    )
    num_warm_up = min(_ahead(forwards, inputs) + lead * (num_workers - 1 - worker), len(forwards))
    line, lag = forwards[:num_warm_up], lead * worker
    for number, action in enumerate(inputs):
        line += (*forwards[num_warm_up + number :][:1], action, *weights[max(0, number - lag) :][: number >= lag])
    return (*line, *weights[max(0, len(inputs) - lag) :])


def zbv(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns ZBV: two stages per worker (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).

    If M < 2P - 1, it is the schedule for 2P - 1 microbatches without the actions on microbatches M and above.
    """
    ensure(stages_per_worker == 2, f"two stages per worker, not {stages_per_worker}")
    line = _zbv_line(worker, num_workers, max(2 * num_workers - 1, num_microbatches))
    return tuple(each for each in line.actions if each.microbatch < num_microbatches)


def _zbv_line(worker: int, num_workers: int, num_microbatches: int) -> WorkerList:
    line, down, up = WorkerList(), worker, 2 * num_workers - 1 - worker
    backward = (Op.I, Op.W)
    line.add(down, *[Op.F] * (2 * (num_workers - worker) - 1))
    for _ in range(worker):
        line.add(up, Op.F)
        line.add(down, Op.F)
    for _ in range(num_workers - worker):
        line.add(up, Op.F, *backward)
    while line.num(up, Op.F) < num_microbatches:
        if line.num(down, Op.F) < num_microbatches:
            line.add(down, Op.F)
        line.add(down, *backward)
        line.add(up, Op.F, *backward)
    for _ in range(worker):
        line.add(down, Op.I)
        line.add(up, Op.I)
    for _ in range(num_workers - worker):
        line.add(down, *backward)
    for stage in (up, down):
        line.add(stage, *[Op.W] * (num_microbatches - line.num(stage, Op.W)))
    return line


# Schedules for little memory, on a V of two stages per worker, with F = I = W = 1.
#
# Microbatches enter six units apart, since a worker has six actions for each, and all take the same way. The shorter
# the way, the fewer are on it: a hop takes one unit (V-Min), or one down the V and two up (V-Half). The units between
# the four passages are chosen so that no two actions of a worker begin at the same time modulo six. A worker runs its
# actions in the order of these times, and in a run each begins as early as it can. V-Min with P = 2, M = 3:
#
#     worker 0  0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2     0I2 0W2
#     worker 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

_PERIOD = 6


def v_min(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns V-Min: a third of the residuals of 1F1B (Qi et al., Controllable Memory, 2024, section 3.2)."""
    turns = (1, 1, 1) if num_workers % 3 else (3, 1, 3)
    return _on_a_v((1, 1, 1, 1), turns, worker, num_workers, stages_per_worker, num_microbatches)


def v_half(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns V-Half: half the residuals of 1F1B, less waiting than V-Min (Qi et al., Controllable Memory, 2024)."""
    turns = (2, 1, 1) if num_workers % 2 else (4, 1, 5)
    return _on_a_v((1, 2, 1, 2), turns, worker, num_workers, stages_per_worker, num_microbatches)


def _on_a_v(
    hops: tuple[int, int, int, int],
    turns: tuple[int, int, int],
    worker: int,
    num_workers: int,
    stages_per_worker: int,
    num_microbatches: int,
) -> ComputeList:
    """Returns a worker's actions by time: `hops` of F down and up the V, of I down and up, and the `turns` between."""
    ensure(stages_per_worker == 2, f"two stages per worker, not {stages_per_worker}")
    down, up, last = worker, 2 * num_workers - 1 - worker, num_workers - 1
    starts = [0, *accumulate(hop * last + turn for hop, turn in zip(hops, turns, strict=False))]
    places = (worker, last - worker, worker, last - worker)  # hops behind the start of each of the four passages
    times = [start + hop * place for start, hop, place in zip(starts, hops, places, strict=True)]
    free = sorted({*range(_PERIOD)} - {time % _PERIOD for time in times})
    weights = min(
        (
            [time + (unit - time) % _PERIOD for time, unit in zip(times[2:], units, strict=True)]
            for units in permutations(free)
        ),
        key=sum,
    )
    stages = (down, up, up, down, up, down)
    ops = (Op.F, Op.F, Op.I, Op.I, Op.W, Op.W)
    begun = sorted(
        (time + _PERIOD * microbatch, stage, op, microbatch)
        for time, stage, op in zip((*times, *weights), stages, ops, strict=True)
        for microbatch in range(num_microbatches)
    )
    return tuple(make_action(stage, op, microbatch) for _, stage, op, microbatch in begun)


# Overlap pairs: a forward and a backward that one worker may run at the same time, as in DualPipeV.
#
# Rules: a pair is a forward and a backward of different microbatches that are neighbours in a worker's program. Their
# order names the kind: OVERLAP_F_B or OVERLAP_B_F. Neither depends on the other, so both stay actions of their own for
# dependencies, faults and recovery. The pass makes the two neighbours: it moves the receives of the second action
# before the pair and the sends of the first behind it. A worker that cannot overlap runs the two in sequence, with the
# same result.

Overlap = Literal["OVERLAP_F_B", "OVERLAP_B_F"]
OVERLAPS: dict[tuple[Op, Op], Overlap] = {(Op.F, Op.B): "OVERLAP_F_B", (Op.B, Op.F): "OVERLAP_B_F"}
_TRANSFERS = RECEIVE_OPS | SEND_OPS


def overlap_of(first: Action, second: Action) -> Overlap | None:
    """Returns the kind of pair that two actions form in this order, or None if they form no pair."""
    same = (first.pipeline, first.microbatch) == (second.pipeline, second.microbatch)
    return None if same else OVERLAPS.get((first.op, second.op))


def pairs_of(
    actions: Sequence[Action], kinds: Container[object] = frozenset(OVERLAPS.values())
) -> Iterator[tuple[int, Overlap]]:
    """Yields the position and the kind of each pair of some kinds; of two that share an action, only the earlier."""
    taken = -1
    for second in range(1, len(actions)):
        kind = overlap_of(actions[second - 1], actions[second])
        if kind and kind in kinds and second - 1 > taken:
            yield second - 1, kind
            taken = second


IsPair = Callable[[Action, Action], bool]


def of_kind(kind: Overlap) -> IsPair:
    """Returns whether two actions form a pair of this kind."""
    return lambda first, second: overlap_of(first, second) == kind


def with_pairs_together(program: Mapping[int, tuple[Action, ...]], is_pair: IsPair) -> dict[int, tuple[Action, ...]]:
    """Returns a program in which no transfer stands between the two actions of a pair."""
    return {worker: _together(actions, is_pair) for worker, actions in program.items()}


def _together(actions: tuple[Action, ...], is_pair: IsPair) -> tuple[Action, ...]:
    moved = list(actions)
    computed = [position for position, action in enumerate(actions) if action.op in COMPUTE_OPS]
    last = -1  # the position of the second action of the previous pair
    for first, second in pairwise(computed):
        between = actions[first + 1 : second]
        if (
            first > last
            and is_pair(actions[first], actions[second])
            and _TRANSFERS.issuperset(action.op for action in between)
        ):
            received = [action for action in between if action.op in RECEIVE_OPS]
            sent = [action for action in between if action.op in SEND_OPS]
            moved[first : second + 1] = [*received, actions[first], actions[second], *sent]
            last = second
    return tuple(moved)


def op_costs(forward: float = 1, backward: float = 2, weights: float = 1) -> dict[Op, float]:
    """Returns the cost of each op that computes; `weights` is the part of a backward for the weights."""
    costs = {
        Work.FORWARD: forward,
        Work.BACKWARD: backward,
        Work.FOR_INPUT: backward - weights,
        Work.FOR_WEIGHTS: weights,
    }
    return {op: costs[row.work] for op, row in OP_TABLE.items() if row.work}


COSTS = op_costs()


def overlapped_costs(cost: Callable[[Action], float], actions: Sequence[Action]) -> list[float]:
    """Returns the cost of each action if pairs overlap: the second of a pair costs max(0, its cost - the first's)."""
    costs = [cost(action) for action in actions]
    for first, _ in pairs_of(actions):
        costs[first + 1] = max(costs[first + 1] - costs[first], 0.0)
    return costs


# DualPipeV: each worker has one stage on the way down a V and one on the way up (after DeepSeek's DualPipe).
#
# In the middle of a step, a worker alternates a forward of one of its stages with a backward of the other; a device
# that can run both at once may overlap them. Backwards are split only where a weight gradient fills a gap. P = 2, M =
# 4:
#
#     worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 -   3F2 0B0 -   3B2 -   3F3     0B1 -   3B3 -   0I2 0W2 0I3 0W3
#     worker 1      1F0 2F0 1F1 2F1 1F2 2B0 -   2F2 1B0 -   1F3 2B1 -   2F3 1B1 -   2B2 -   1B2 -   2I3 1I3 2W3 1W3


def dual_pipe_v(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns DualPipeV (github.com/deepseek-ai/DualPipe, the cut-in-half form); needs M >= 2P."""
    ensure(stages_per_worker == 2, f"two stages per worker, not {stages_per_worker}")
    ensure(num_microbatches >= 2 * num_workers, f"{num_microbatches} microbatches for {num_workers} workers")
    return tuple(_line(worker, num_workers, num_microbatches).actions)


def _line(worker: int, num_workers: int, num_microbatches: int) -> WorkerList:
    line, down, up = WorkerList(), worker, 2 * num_workers - 1 - worker
    behind = num_workers - 1 - worker
    line.add(down, *[Op.F] * (2 * behind))
    for _ in range(worker + 1):
        line.add(down, Op.F)
        line.add(up, Op.F)
    for _ in range(behind):
        line.add(up, Op.I, Op.W, Op.F)
    for _ in range(num_microbatches - 2 * num_workers + worker + 1):
        _cross(line, down, up)
        _cross(line, up, down)
    for _ in range(behind):
        line.add(up, Op.B)
        _cross(line, up, down)
    _drain(line, worker, behind, (up, down))
    return line


def _cross(line: WorkerList, forward: int, backward: int) -> None:
    line.add(forward, Op.F)
    line.add(backward, Op.B)


def _drain(line: WorkerList, worker: int, behind: int, stages: tuple[int, int]) -> None:
    """Runs the last backwards; later ones are split, and their weight gradients fill the gaps between the next ones."""
    put_off: deque[int] = deque()
    number = 0

    def back(stage: int) -> None:
        nonlocal number
        if number <= worker:
            line.add(stage, Op.B)
        else:
            line.add(stage, Op.I)
            put_off.append(stage)
        number += 1

    for _ in range(worker + 1):
        for stage in stages:
            back(stage)
    for _ in range(behind):
        if put_off:
            line.add(put_off.popleft(), Op.W)
        back(stages[1])
    while put_off:
        line.add(put_off.popleft(), Op.W)


# DualPipe: two pipelines of opposite directions on the same workers. Worker w has stage w of one, P - 1 - w of the
# other.
#
# Each direction has its own copy of the weights, and their gradients are added as those of any two pipelines. Worker w
# of the first half has the order of worker w of DualPipeV on P / 2 workers: what goes down the V there goes in its own
# direction here, and what comes up the V there comes from the other end. The second half mirrors the first. P = 2, M =
# 2, with an @ at actions of the second pipeline:
#
#     worker 0  0F0  1F0@ 0F1  1B0@ -    1F1@ 0B0  -    1B1@ -    0I1  0W1
#     worker 1  0F0@ 1F0  0F1@ 1B0  -    1F1  0B0@ -    1B1  -    0I1@ 0W1@


def dual_pipe(worker: int, num_workers: int, stages_per_worker: int, num_microbatches: int) -> ComputeList:
    """Returns DualPipe, for two pipelines of opposite directions (DeepSeek-V3 report, 2024, 3.2.1); M >= P, P even."""
    ensure(stages_per_worker == 1, f"one stage per worker and direction, not {stages_per_worker}")
    ensure(num_workers % 2 == 0, f"{num_workers} workers")
    half = num_workers // 2
    line = dual_pipe_v(min(worker, num_workers - 1 - worker), half, 2, num_microbatches)
    return tuple(action._replace(pipeline=int((action.stage < half) != (worker < half))) for action in line)


# The built-in schedules and the limits of each; a user's own schedule is the CSV text of its compute lists.
@dataclass(frozen=True, slots=True)
class Schedule:
    """A generator and the limits of its arguments. With one stage per worker both placements are the same."""

    generate: Generator
    placement: Placement = "loop"
    stages_per_worker: tuple[int, int] = (1, 1)  # least and most
    least_microbatches: Callable[[int], int] = lambda num_workers: 1
    overlaps: Overlap | None = None  # the kind of pairs that `with_pairs_together` makes
    in_list_order: bool = False  # with unequal stages the list scheduler has its order, or a quicker one

    def takes(self, stages_per_worker: int) -> bool:
        """Returns whether a worker may have this number of stages."""
        least, most = self.stages_per_worker
        return least <= stages_per_worker <= most

    def __call__(self, num_workers: int, num_microbatches: int, stages_per_worker: int = 1) -> ComputeLists:
        """Returns the compute lists of `num_workers` workers: of one pipeline in each direction."""
        shape = (num_workers, stages_per_worker, num_microbatches)
        return tuple(self.generate(worker, *shape) for worker in range(num_workers))


_ANY = 4096
SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b, in_list_order=True),
    "eager-1f1b": Schedule(eager_one_f_one_b, in_list_order=True),
    "gpipe": Schedule(gpipe, in_list_order=True),
    "interleaved": Schedule(interleaved, stages_per_worker=(1, _ANY)),
    "interleaved-flexible": Schedule(interleaved_flexible, stages_per_worker=(1, _ANY)),
    "interleaved-paired": Schedule(interleaved, stages_per_worker=(2, _ANY), overlaps="OVERLAP_B_F"),
    "looped-bfs": Schedule(looped_bfs, stages_per_worker=(1, _ANY)),
    "zb1p": Schedule(zb1p, stages_per_worker=(1, _ANY)),
    "zb2p": Schedule(zb2p),
    "v-min": Schedule(v_min, "v", (2, 2)),
    "v-half": Schedule(v_half, "v", (2, 2)),
    "zbv": Schedule(zbv, "v", (2, 2)),
    "dualpipev": Schedule(dual_pipe_v, "v", (2, 2), lambda num_workers: 2 * num_workers),
    "dualpipev-overlapped": Schedule(
        dual_pipe_v, "v", (2, 2), lambda num_workers: 2 * num_workers, overlaps="OVERLAP_F_B"
    ),
    "dualpipe": Schedule(dual_pipe, least_microbatches=lambda num_workers: num_workers),
}

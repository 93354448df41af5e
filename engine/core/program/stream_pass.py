"""The pass that streams accumulators: every c microbatches a slot's owner sends its shadows what it has added up.

Rules: the owner sends behind the backward, or its part for the weights, and behind what that one hands on; not after
the last one, behind which the log follows. A shadow takes it at the first place at which, in a run with the usual
costs, it was sent a forward's time ago, and at the latest behind all that it computes: so it seldom waits for it, and
the order is that of a valid run. Nothing comes between a pair of a forward and a backward (`overlap_pairs.py`). A
forward that a shadow would run only after it has taken what comes behind that forward is left out. Whole steps stream,
the plan of a recovery does not; a shadow that is healing takes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.core.action import SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dry_run import Span, dry_run
from engine.core.schedules.overlap_pairs import overlap_of

_UNDER_WAY = 1.0  # in forwards

_Stream = tuple[float, Action]  # when it is sent, and the action


def is_streamed(microbatch: int, log_every: int, num_microbatches: int) -> bool:
    """Says whether what is added up is streamed after the backward of a microbatch."""
    return log_every > 0 and (microbatch + 1) % log_every == 0 and microbatch < num_microbatches - 1


def with_streams(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    log_every: int,
    healing: Collection[tuple[int, Slot]] = (),
    blocking: bool = False,
) -> Mapping[int, tuple[Action, ...]]:
    """Returns a program of compute actions and transfers with its streams; as it is where `log_every` is 0.

    `healing` are the shadows, as (worker, slot), that take none; with `blocking` a send waits for its receive.
    """
    if log_every == 0:
        return program
    spans: dict[int, list[Span]] = {worker: [] for worker in program}
    for span in dry_run(program, ownership, blocking=blocking).spans:
        spans[span.worker].append(span)
    sent: dict[int, list[_Stream]] = {worker: [] for worker in program}
    taken: dict[int, list[_Stream]] = {worker: [] for worker in program}
    for worker, mine in spans.items():
        for position, (_, _, _, (stage, op, microbatch, pipeline)) in enumerate(mine):
            if op not in (Op.B, Op.W) or not is_streamed(microbatch, log_every, ownership.grid.microbatches):
                continue
            last = position  # of the backward and what it hands on
            while last + 1 < len(mine) and mine[last + 1].action.op in SEND_OPS:
                last += 1
            stream = (mine[last].end, Action(stage, Op.STREAM, microbatch, pipeline))
            slot = (pipeline, stage)
            takers = [each for each in ownership.shadows_of(*slot) if (each, slot) not in healing]
            for taker in takers:
                taken[taker].append(stream)
            sent[worker] += [stream] if takers else []
    return {worker: _joined(mine, sent[worker], sorted(taken[worker])) for worker, mine in spans.items()}


def _joined(spans: Sequence[Span], sent: Sequence[_Stream], taken: Sequence[_Stream]) -> tuple[Action, ...]:
    """Returns one worker's actions with what it sends and takes; neither stands between a backward and its transfer."""
    line: list[Action] = []
    to_send, to_take = list(reversed(sent)), list(reversed(taken))
    reached: dict[Slot, int] = {}  # the last microbatch of what has been taken
    for start, _, _, action in spans:
        is_pair = bool(line) and overlap_of(line[-1], action) == "OVERLAP_F_B"
        if action.op not in SEND_OPS and not is_pair:
            while to_send and to_send[-1][0] <= start:
                line.append(to_send.pop()[1])
            while to_take and to_take[-1][0] + _UNDER_WAY <= start:
                line.append(to_take.pop()[1])
                reached[line[-1].pipeline, line[-1].stage] = line[-1].microbatch
        if action.op is not Op.F or action.microbatch > reached.get((action.pipeline, action.stage), -1):
            line.append(action)
    return (*line, *(stream for _, stream in (*reversed(to_send), *reversed(to_take))))

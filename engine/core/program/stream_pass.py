"""The pass that streams accumulators: every c microbatches the owner of a slot sends its accumulator to the shadows.

The owner sends behind the backward, or its part for the weights, and behind the send of the backward's gradient. It
does not send behind the last backward, where the log follows. A shadow takes a stream at the first place that, in a run
with the usual costs, is one forward later than the send; at the latest behind all its compute actions. So the shadow
seldom waits, and the order is that of a valid run.

    owner    1B0 1SEND_B0 1STREAM0 1F3 ...
    shadow            2B0          2F3 1STREAM0 ...

No stream stands inside a pair of a forward and a backward (`overlap_pairs.py`). A shadow's forward is left out if the
shadow has already taken a stream of that microbatch or a later one. Only whole steps stream, not the plan of a
recovery. A shadow that is healing takes no stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.core.action import ADDING_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dry_run import Span, dry_run
from engine.core.schedules.overlap_pairs import overlap_of

_UNDER_WAY = 1.0  # in forwards

_Stream = tuple[float, Action]  # when it is sent, and the action


def is_streamed(microbatch: int, log_every: int, num_microbatches: int) -> bool:
    """Says whether the accumulator is streamed behind the backward of a microbatch."""
    return log_every > 0 and (microbatch + 1) % log_every == 0 and microbatch < num_microbatches - 1


def with_streams(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    log_every: int,
    healing: Collection[tuple[int, Slot]] = (),
) -> Mapping[int, tuple[Action, ...]]:
    """Returns a program of compute actions and transfers with its streams; as it is where `log_every` is 0.

    `healing` are the shadows, as (worker, slot), that take no stream.
    """
    if log_every == 0:
        return program
    spans: dict[int, list[Span]] = {worker: [] for worker in program}
    for span in dry_run(program, ownership).spans:
        spans[span.worker].append(span)
    sent: dict[int, list[_Stream]] = {worker: [] for worker in program}
    taken: dict[int, list[_Stream]] = {worker: [] for worker in program}
    for worker, mine in spans.items():
        for position, (_, _, _, (stage, op, microbatch, pipeline)) in enumerate(mine):
            if op not in ADDING_OPS or not is_streamed(microbatch, log_every, ownership.grid.microbatches):
                continue
            last = position  # of the backward and its send
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
    """Returns one worker's actions with its streams; none stands between a backward and its transfer."""
    line: list[Action] = []
    to_send, to_take = list(reversed(sent)), list(reversed(taken))
    reached: dict[Slot, int] = {}  # the last microbatch of the streams taken
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

"""The catch-up point of a recovery: the moment at which the heir has redone the work of the victim on a slot.

Rule: the heir replays the backwards of the slot from the first microbatch on, unless a stream has brought some. It has
caught up when the first of these moments comes:
- after the last backward that the victim had begun (the first one if it had begun none);
- with streams, before the next backward, because the stream may have brought the last one;
- before the COMMIT, because a slot whose backwards were all done is not replayed.
"""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.config.job import Job
from engine.core.faults.fault import At
from engine.core.ownership import Ownership, Slot
from engine.core.program.build import build_program
from engine.core.program.replay import replayed


def catch_up_points(job: Job, before: Ownership, slot: Slot, at: tuple[int, str], step: int) -> tuple[At, ...]:
    """Returns the moments, of which the first to come is the catch-up point; none if the victim had not begun `step`.

    `at` are the last step and action of the slot's owner under the ownership `before`.
    """
    pipeline, stage = slot
    if at[0] != step or not at[1]:
        return ()
    backwards = [Action(stage, Op.B, microbatch, pipeline) for microbatch in range(job.microbatches)]
    program = build_program(job.schedule, before, job.redundancy, log_every=job.log_every)
    actions = program[before.owner(*slot)]
    last = backwards[-1]  # the victim ran the plan of another recovery: this may be a little late
    was_at = [position for position, action in enumerate(actions) if str(action) == at[1]]
    if was_at:
        last = [backwards[0], *replayed(backwards, actions[: was_at[0] + 1])][-1]
    behind = backwards[last.microbatch + 1 : last.microbatch + 2] if job.log_every else []
    return (
        At(step, last, "after"),
        *(At(step, each, "before") for each in behind),
        At(step, Action(stage, Op.COMMIT, pipeline=pipeline), "before"),
    )

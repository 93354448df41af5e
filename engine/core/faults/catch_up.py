"""The catch-up point of a recovery, as moments: when what a dead worker had done for a slot has been done again.

Rule: an heir adds up the gradient of a slot that is not done from the first microbatch on. So it has caught up at the
latest with the backward that the victim had begun last, or with the first one; where accumulators are streamed, that
one may have come with them, and so when it begins the one behind it; of a slot that is done there is nothing to do
again but its commit.
"""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.config.job import Job
from engine.core.faults.fault import At
from engine.core.ownership import Ownership, Slot
from engine.core.program.build import build_program


def catch_up_points(job: Job, before: Ownership, slot: Slot, at: tuple[int, str], step: int) -> tuple[At, ...]:
    """Returns the moments, the first of which to come is the catch-up point; none when nothing of `step` was lost.

    `at` are the step and the action at which the owner of the slot was last, under the ownership `before`.
    """
    pipeline, stage = slot
    if at[0] != step or not at[1]:
        return ()
    backwards = [Action(stage, Op.B, microbatch, pipeline) for microbatch in range(job.microbatches)]
    program = build_program(job.schedule, before, job.redundancy, log_every=job.log_every)
    actions = [str(each) for each in program[before.owner(*slot)]]
    last = backwards[-1]  # of whoever ran the plan of another recovery: it is past the catch-up point, not long
    if at[1] in actions:
        begun = actions[: actions.index(at[1]) + 1]
        last = next((each for each in reversed(backwards) if str(each) in begun), backwards[0])
    behind = backwards[last.microbatch + 1 : last.microbatch + 2] if job.log_every else []
    return (
        At(step, last, "after"),
        *(At(step, each, "before") for each in behind),
        At(step, Action(stage, Op.COMMIT, pipeline=pipeline), "before"),
    )

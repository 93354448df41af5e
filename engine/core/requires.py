"""The happens-before rule, written once: what must have happened before an action may run.

Verification, the dry run, the passes and the tests all ask `requires`; nobody states the rule again. A gradient is
accumulated in microbatch order, so every backward waits for the one before it on the same slot.
"""

from __future__ import annotations

from engine.core.action import Action, Op
from engine.core.ownership import Ownership

Need = tuple[int, Action]  # (worker, action): the action must be finished on that worker


def requires(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    """Returns what must be finished, and where, before `worker` may run `action`."""
    return _RULES[action.op](action, worker, ownership)


def rendezvous(action: Action, ownership: Ownership) -> tuple[Need, ...]:
    """Returns the actions of other workers that run together with this one: each waits until the others have begun.

    Only the reduction over pipelines is of this kind.
    """
    if action.op is not Op.REDUCE_GRAD:
        return ()
    others = (pipeline for pipeline in range(ownership.grid.pipelines) if pipeline != action.pipeline)
    return tuple(
        (ownership.owner(pipeline, action.stage), Action(action.stage, Op.REDUCE_GRAD, pipeline=pipeline))
        for pipeline in others
    )


def _like(action: Action, op: Op, *, stage: int | None = None, microbatch: int | None = None) -> Action:
    return Action(
        action.stage if stage is None else stage,
        op,
        action.microbatch if microbatch is None else microbatch,
        action.pipeline,
    )


def _forward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    if action.stage == 0:
        return ()
    if ownership.owner(action.pipeline, action.stage - 1) == worker:
        return ((worker, _like(action, Op.F, stage=action.stage - 1)),)
    return ((worker, _like(action, Op.RECV_F)),)


def _backward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    needs = [(worker, _like(action, Op.F))]
    if action.microbatch > 0:
        needs.append((worker, _like(action, Op.B, microbatch=action.microbatch - 1)))
    if action.stage < ownership.grid.stages - 1:
        if ownership.owner(action.pipeline, action.stage + 1) == worker:
            needs.append((worker, _like(action, Op.B, stage=action.stage + 1)))
        else:
            needs.append((worker, _like(action, Op.RECV_B)))
    return tuple(needs)


def _send_forward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    return ((worker, _like(action, Op.F)),)


def _send_backward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    return ((worker, _like(action, Op.B)),)


def _receive_forward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    sender = ownership.owner(action.pipeline, action.stage - 1)
    return ((sender, _like(action, Op.SEND_F, stage=action.stage - 1)),)


def _receive_backward(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    sender = ownership.owner(action.pipeline, action.stage + 1)
    return ((sender, _like(action, Op.SEND_B, stage=action.stage + 1)),)


def _reduce(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    return ((worker, _like(action, Op.B, microbatch=ownership.grid.microbatches - 1)),)


def _commit(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    stages = (action.stage, *ownership.grid.tied_to(action.stage))
    return tuple(
        (ownership.owner(action.pipeline, stage), _like(action, Op.REDUCE_GRAD, stage=stage)) for stage in stages
    )


def _step(action: Action, worker: int, ownership: Ownership) -> tuple[Need, ...]:
    return tuple(
        (ownership.owner(pipeline, stage), Action(stage, Op.COMMIT, pipeline=pipeline))
        for pipeline, stage in ownership.grid.slots()
    )


_RULES = {
    Op.F: _forward,
    Op.B: _backward,
    Op.SEND_F: _send_forward,
    Op.SEND_B: _send_backward,
    Op.RECV_F: _receive_forward,
    Op.RECV_B: _receive_backward,
    Op.REDUCE_GRAD: _reduce,
    Op.COMMIT: _commit,
    Op.STEP: _step,
}

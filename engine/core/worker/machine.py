"""The worker machine: `step(state, input) -> (state, outputs)`, a pure function given by one table.

    BOUNDARY --epoch--> FROZEN --plan--> PLANNED --go--> RUNNING --> VOTED --commit--> RUNNING ... --> DONE
       ^                  any mode --newer epoch--> FROZEN        VALIDATING: between two steps
       '--commit that begins an epoch--          any mode --failed transfer--> SUSPECTING --newer epoch--> FROZEN
    WAITING --epoch that has it as a member--> FROZEN

Rules: the rule for an input is `TABLE[mode, type of input]`, of a message `TABLE[mode, type of message]`. A newer epoch
ends every wait; what the worker then holds decides, not what it was about to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.errors import Impossible, InvariantError
from engine.core.message_codec import Message
from engine.core.messages import CommitMessage, EpochMessage, GoMessage, ValidatedMessage
from engine.core.process_messages import ByeMessage, NextGroupMessage, StopMessage
from engine.core.recovery.plan_messages import PlanMessage, PrepareMessage
from engine.core.worker import inputs
from engine.core.worker.next_groups import forms, is_next_formed
from engine.core.worker.recovery_rules import (
    catches_up,
    enters,
    gives_up_joining,
    goes,
    is_counted,
    is_formed,
    is_planned,
    is_prepared,
    is_taken_in,
    plans,
    prepares,
)
from engine.core.worker.state import Mode, WorkerState
from engine.core.worker.step_rules import (
    Stepped,
    changes_nothing,
    gives_notice,
    has_passed,
    has_run,
    heals,
    is_known,
    is_let_go,
    is_validated,
    joins,
    leaves,
    opens_step,
    stops,
    suspects,
    takes_step,
)

WorkerRule = Callable[[WorkerState, Any], Stepped]


_UNJOINED = Impossible("the worker has not joined")
_JOINED = Impossible("a worker joins once")
_UNPLANNED = Impossible("training goes on when every member has made the plan")
_AT_WORK = Impossible("a message that does not interrupt waits until the program has ended")
_UNASKED = Impossible("the main thread was not asked for this")
_LATE = changes_nothing  # it repeats a message that has been obeyed
_FIXED = changes_nothing  # an inventory freezes its worker: not even a commit is accepted
_DEAF = changes_nothing  # a worker that suspects waits for the next epoch
_OUT = changes_nothing
_NO_MEMBER = Impossible("an epoch makes a waiting worker a member before anything else is asked of it")

# before the worker has joined, and after it
_ALWAYS: dict[type[Message] | type[inputs.Input], tuple[WorkerRule | Impossible, WorkerRule | Impossible]] = {
    EpochMessage: (gives_up_joining, enters),
    StopMessage: (stops, stops),
    inputs.NoticeGiven: (gives_notice, gives_notice),
    inputs.Built: (joins, _JOINED),
    PrepareMessage: (_UNJOINED, prepares),
    NextGroupMessage: (_UNJOINED, forms),
    inputs.NextGroupFormed: (_UNJOINED, is_next_formed),
    inputs.PlanPrepared: (_UNJOINED, is_prepared),
    inputs.GroupFormed: (_UNJOINED, is_formed),
}
_TRAINING = (*Mode,)[2:-1]
# fmt: off
_SOMETIMES: dict[type[Message] | type[inputs.Input], tuple[WorkerRule | Impossible, ...]] = {
    #                         boundary  frozen      planned   running   voted       validating    suspecting  done
    PlanMessage:             (_LATE,    plans,      _LATE,    _AT_WORK, _LATE,      _LATE,        _DEAF,      _LATE),
    GoMessage:               (_LATE,    _UNPLANNED, goes,     _AT_WORK, _LATE,      _LATE,        _DEAF,      _LATE),
    CommitMessage:           (is_known, _FIXED,     is_known, _AT_WORK, takes_step, is_known,     _DEAF,      is_known),
    ValidatedMessage:        (_LATE,    _LATE,      _LATE,    _AT_WORK, _LATE,      is_validated, _DEAF,      _LATE),
    ByeMessage:              (_LATE,    _LATE,      _LATE,    _AT_WORK, _LATE,      _LATE,        _DEAF,      leaves),
    inputs.TransferFailed:   (suspects, suspects,   suspects, suspects, suspects,   suspects,     _DEAF,      suspects),
}
# fmt: on
_WHILE_WAITING: dict[type[Message] | type[inputs.Input], WorkerRule] = {
    EpochMessage: is_taken_in,
    StopMessage: stops,
    ByeMessage: is_let_go,
    CommitMessage: changes_nothing,  # it comes again with the epoch that it begins
    inputs.NoticeGiven: gives_notice,
    PrepareMessage: prepares,
    inputs.PlanPrepared: is_prepared,
    NextGroupMessage: forms,
    inputs.NextGroupFormed: is_next_formed,
}
_ANSWERS: dict[type[inputs.Input], dict[Mode, WorkerRule]] = {
    inputs.Counted: {Mode.FROZEN: is_counted},
    inputs.PlanMade: {Mode.FROZEN: is_planned},
    inputs.StepTaken: {Mode.FROZEN: catches_up, Mode.VOTED: opens_step},
    inputs.NextStepMade: {Mode.VOTED: heals},
    inputs.ProgramEnded: {Mode.RUNNING: has_run},
    inputs.PassEnded: {Mode.VALIDATING: has_passed},
}

KINDS: tuple[type[Message] | type[inputs.Input], ...] = (*_ALWAYS, *_SOMETIMES, *_ANSWERS)
TABLE: dict[tuple[Mode, type[Message] | type[inputs.Input]], WorkerRule | Impossible] = {
    **{(Mode.JOINING, kind): _UNJOINED for kind in _SOMETIMES},
    **{(mode, kind): _UNASKED for kind in _ANSWERS for mode in Mode},
    **{(Mode.JOINING, kind): before for kind, (before, _) in _ALWAYS.items()},
    **{(mode, kind): after for kind, (_, after) in _ALWAYS.items() for mode in _TRAINING},
    **{(mode, kind): cell for kind, row in _SOMETIMES.items() for mode, cell in zip(_TRAINING, row, strict=True)},
    **{(mode, kind): rule for kind, row in _ANSWERS.items() for mode, rule in row.items()},
    **{(Mode.WAITING, kind): _NO_MEMBER for kind in KINDS},
    **{(Mode.WAITING, kind): rule for kind, rule in _WHILE_WAITING.items()},
    **{(Mode.OUT, kind): _OUT for kind in KINDS},
}


def step(state: WorkerState, given: inputs.Input) -> Stepped:
    """Returns the state after an input, and the outputs to carry out.

    Raises InvariantError if the input is impossible in this mode, or contradicts what this worker holds.
    """
    about: Any = given.message if isinstance(given, inputs.Told) else given
    cell = TABLE[state.mode, type(about)]
    if isinstance(cell, Impossible):
        raise InvariantError(f"{type(about).__name__} at worker {state.worker} while {state.mode}: {cell.reason}")
    return cell(state, about)

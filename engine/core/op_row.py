"""The columns of the table of ops in `action.py`: the rules that an op has.

`needs` and `makes` are the happens-before rule of pipeline parallelism: the forward of a stage needs the output of the
stage before, the backward needs the output of the backward of the stage behind.

    worker 0   0F0 0SEND_F0                               0RECV_B0 0B0
    worker 1                1RECV_F0 1F0 1B0 1SEND_B0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

from engine.core.value import Kind


class Stands(Enum):
    """Where the program of a step has an op."""

    FORWARD = auto()  # at the owner of each slot for each microbatch; a shadow may run it too
    BACKWARD = auto()  # at the owner of each slot for each microbatch, unless its parts stand there
    PART = auto()  # at the owner of the slot, both parts in place of a backward
    AGAIN = auto()  # at the owner of the slot, in the plan of a recovery only
    BORDER = auto()  # for each microbatch, at the owner of the slot if the stage `peer` further is on another worker
    STREAM = auto()  # at the owner of the slot and its shadows, for the microbatches that the program chooses
    HAND_OVER = auto()  # in a plan only: at the owner of the slot, and at the member that has added more of it
    ANY_TIMES = auto()  # at the owner of the slot, as often as the program chooses
    STAGE = auto()  # at each owner of a stage, with the first of its pipelines
    REPLICA = auto()  # at the owner of each slot and at its shadows
    HEALING = auto()  # at each shadow that is healing, and at the owner of its slot
    WRITER = auto()  # in no program: behind the optimizer step of a step that is kept, at the writer of the stage


class Work(Enum):
    """The cost of an op that computes."""

    FORWARD = auto()
    BACKWARD = auto()
    FOR_INPUT = auto()  # a backward without the part for the weights
    FOR_WEIGHTS = auto()


class Shown(StrEnum):
    """The entry in the legend of a timeline."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARTS = "backward in parts"
    TRANSFER = "transfer"
    REDUCE = "reduce, log"
    COMMIT = "commit, step"
    HEAL = "heal"
    WAITING = "waiting"


class WeightForm(Enum):
    """The form of a stage's weights where the job shards them."""

    WHOLE = auto()
    IN_SHARDS = auto()


class Where(Enum):
    """The place of a value that an action needs or makes."""

    HERE = auto()  # at the worker that runs the action
    WIRE = auto()
    TIED = auto()  # one value for each tied stage: at the worker if it owns that stage too, else on the wire
    VOTERS = auto()  # one value for each replica of each slot, on the wire


class By(Enum):
    """The workers to which a term applies."""

    ALL = auto()
    OWNER = auto()
    SHADOW = auto()


class Term(NamedTuple):
    """A value that an action needs or makes, relative to the action's stage and microbatch."""

    kind: Kind
    at: Where = Where.HERE
    stage: int = 0  # further; a stage outside the pipeline drops the term
    microbatch: int = 0  # further; a microbatch before the first drops the term
    by: By = By.ALL


ALL: Final = 1 << 30  # more microbatches than a step has; as a term's microbatch: the last


@dataclass(frozen=True, slots=True)
class OpRow:
    """The rules of one op.

    Two of them are about the place of an action in its worker's list. They join `needs` and `makes` where an action
    takes a value away:

    - `closes`: how far the action closes the replica. ``0`` closes it up to the action's microbatch, ``-1`` up to the
      one before, `ALL` for the rest of the step. An action that `touches` the replica must come before.
    - `finds` and `leaves`: the form of the stage's weights before and after, where the job shards them.

          shadow   1F0 1F1 1STREAM1 1F2 ... 1LOG    1F1 behind 1STREAM1, or 1F2 behind 1LOG, comes too late
          owner    0UNSHARD 0F0 0B0 0RESHARD 0STEP  0F0 before 0UNSHARD finds shards
    """

    about: str
    stands: Stands
    shown: Shown
    needs: tuple[Term, ...] = ()
    makes: tuple[Term, ...] = ()
    work: Work | None = None  # None: the op does not compute
    redoes: str = ""  # the op whose output this one makes again
    peer: int = 0  # the other end of a transfer, in stages from this one
    meets: bool = False  # the owners of the stage in all pipelines run it together
    per_pipeline: bool = False  # needs and makes the same for each pipeline in which the worker owns the stage
    touches: bool = False
    closes: int | None = None
    finds: WeightForm | None = None  # an op that computes finds the weights whole
    leaves: WeightForm | None = None

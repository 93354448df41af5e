"""The state of the coordinator: one immutable value; what another coordinator needs of it is kept in the store.

Rules: `documents` are the values of keys in the store, and `resume` makes a state of them. The ballot and the
preparation are not kept: a coordinator that takes over begins an epoch, and in a new epoch all votes come again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from engine.core.config.job import Job
from engine.core.coordinator.inputs import Place
from engine.core.coordinator.preparation import Preparation
from engine.core.errors import InvariantError
from engine.core.membership import state as membership_state
from engine.core.membership.state import State
from engine.core.messages import CommitMessage, EpochMessage
from engine.core.ownership import Grid, Ownership
from engine.core.recovery.ballot import Ballot, Commit

STATE, COMMIT, FACTS = "state", "commit", "facts"  # keys in the store


class Raised(NamedTuple):
    """An exception of a worker: the open step, the error, and words that follow "worker N"."""

    step: int
    error: str
    words: str


class CoordinatorState(NamedTuple):
    """All decisions so far, and the messages that were sent about them. Mappings are by worker and never modified."""

    job: Job
    membership: State
    commit: Commit | None = None  # the last one
    started: int = 0  # the last epoch whose plan may run; 0 before training
    validated: int = -1  # the last step whose validation is known
    raised: Mapping[int, Raised] = {}
    codes: Mapping[int, int] = {}  # the exit codes of workers that have ended
    # The following is not kept.
    ballot: Ballot | None = None  # None while no vote counts
    preparation: Preparation = Preparation(0)
    epoch: EpochMessage | None = None  # the last one that was sent
    planned: int = 0  # the last epoch whose plan was sent
    leaving: tuple[int, ...] = ()  # in the last plan
    told: CommitMessage | None = None  # the last one that was sent
    owners: tuple[int, ...] = ()  # as last recorded
    places: Mapping[int, Place] = {}
    graces_ns: Mapping[int, int] = {}  # of workers that have given notice
    restarts: int = 0  # that were ordered
    staying: Mapping[int, str] = {}  # workers that have given notice and cannot leave, and why
    is_released: bool = False
    is_stopping: bool = False

    @property
    def ownership(self) -> Ownership:
        """The owners and shadows by the last decision."""
        grid = Grid(self.job.stages, self.job.microbatches, self.job.pipelines)
        return Ownership(grid, self.membership.owners, self.membership.shadows)


def begin(job: Job, membership: State, now_ns: int) -> CoordinatorState:
    """Returns the first state of a coordinator, with the first state of the membership protocol."""
    return CoordinatorState(job, membership, preparation=Preparation(now_ns))


def documents(state: CoordinatorState) -> dict[str, str]:
    """Returns the value of each key in the store, as one line of JSON."""
    facts = {name: getattr(state, name) for name in ("started", "validated", "raised", "codes")}
    found = {STATE: membership_state.to_json(state.membership), FACTS: json.dumps(facts, sort_keys=True)}
    return found if state.commit is None else found | {COMMIT: json.dumps(state.commit._asdict())}


def resume(job: Job, found: Mapping[str, str], now_ns: int) -> CoordinatorState:
    """Returns the state that another coordinator has kept in `documents`, on this one's clock.

    Raises InvariantError if one of them is of another form.
    """
    membership = membership_state.resume(found[STATE], now_ns)
    try:
        facts = json.loads(found[FACTS])
        commit = Commit(**json.loads(found[COMMIT])) if COMMIT in found else None
        raised = {int(worker): Raised(*each) for worker, each in facts["raised"].items()}
        codes = {int(worker): int(code) for worker, code in facts["codes"].items()}
        new = begin(job, membership, now_ns)._replace(
            started=int(facts["started"]), validated=int(facts["validated"]), raised=raised, codes=codes
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvariantError(f"these are no facts and no commit of a coordinator: {error!r}") from error
    if commit is not None:
        then: Literal["end", "step"] = "end" if membership.is_over else "step"
        new = new._replace(commit=commit, told=CommitMessage(commit.step, commit.clip_factor, then))
    return new._replace(owners=membership.owners)

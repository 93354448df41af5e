"""The state of the coordinator: one immutable value; what another coordinator needs of it is kept in the store.

Rules: `documents` are the values of keys in the store, and `resume` makes a state of them. The ballot and the
preparation are not kept: a coordinator that takes over begins an epoch, and in a new epoch all votes come again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from engine.core.checkpoints.keeping import Keeping, keeping_of
from engine.core.config.job import Job
from engine.core.coordinator.inputs import Place
from engine.core.coordinator.next_group import NextGroup
from engine.core.duration import parse_duration
from engine.core.elastic.way_out import WayOut
from engine.core.errors import InvariantError, required
from engine.core.membership import state as membership_state
from engine.core.membership.state import Options, State
from engine.core.messages import CommitMessage, EpochMessage
from engine.core.ownership import Ownership
from engine.core.recovery.ballot import Ballot, Commit
from engine.core.recovery.plan_messages import PlanMessage

_keeping_of = lru_cache(maxsize=64)(keeping_of)
_PATIENCE_S = 600
_MAX_RESTARTS = 3  # of the workers, if one of them dies before the first commit
ROLE, STATE, COMMIT, FACTS = "coordinator", "state", "commit", "facts"  # keys in the store
READERS = ("epoch", "status", "reconfigured", "verdicts", "plan", "members/", "heartbeats")  # others, and prefixes


class Raised(NamedTuple):
    """An exception of a worker: the open step, its `WorkerException.kind`, and words that follow "worker N".

    `of_gpu` has the slots that the worker owned if its GPU had failed, else None.
    """

    step: int
    kind: str
    words: str
    of_gpu: tuple[int, ...] | None = None


class Preparation(NamedTuple):
    """The epoch that the coming commit will begin, and the answers of the workers."""

    begun_ns: int  # when the open step began
    number: int = -1  # of the latest plan
    document: PlanMessage | None = None  # the latest plan
    digests: Mapping[int, str] = {}  # the answers, by worker
    deadlines_ns: Mapping[int, int] = {}  # the end of the grace of each worker that has given notice
    waited_in: int = 0  # the latest epoch that went on for one more step
    elastic: bool = False
    noticed_after: Mapping[int, int] = {}  # the last commit before the notice of each worker


class CoordinatorState(NamedTuple):
    """All decisions so far, and the messages that were sent about them. Mappings are by worker and never modified."""

    job: Job
    membership: State
    commit: Commit | None = None  # the last one
    started: int = 0  # the last epoch whose plan may run; 0 before training
    validated: int = -1  # the last step whose validation is known
    kept: int = -1  # the last step whose state is kept as a checkpoint
    raised: Mapping[int, Raised] = {}
    codes: Mapping[int, int] = {}  # the exit codes of workers that have ended
    deadly: str = ""  # the deadly hosts as last told, in words
    # The following is not in the store.
    kept_ns: int = 0  # when that step was committed; at first when the coordinator began
    ballot: Ballot | None = None  # None while no vote counts
    preparation: Preparation = Preparation(0)
    next_group: NextGroup = NextGroup()
    epoch: EpochMessage | None = None  # the last one that was sent
    planned: int = 0  # the last epoch whose plan was sent
    leaving: tuple[int, ...] = ()  # in the last plan
    wanted: tuple[int, ...] = ()  # in the last plan
    hosts: tuple[int, ...] = ()  # in the last plan
    told: CommitMessage | None = None  # the last one that was sent
    owners: tuple[int, ...] = ()  # as last recorded
    places: Mapping[int, Place] = {}
    graces_ns: Mapping[int, int] = {}  # of workers that have given notice
    restarts: int = 0  # that were ordered
    ways: Mapping[int, WayOut] = {}  # of workers that have given notice, as last told
    staying: Mapping[int, str] = {}  # workers that have given notice and cannot leave, and why
    is_released: bool = False
    is_stopping: bool = False

    @property
    def keeping(self) -> Keeping:
        """The rule by which commits are kept as checkpoints."""
        return required(_keeping_of(self.job.checkpoint_every), "the field checkpoint_every is checked")

    @property
    def ownership(self) -> Ownership:
        """The owners and shadows by the last decision."""
        return Ownership(self.job.grid, self.membership.owners, self.membership.shadows)


def begin(job: Job, membership: State, now_ns: int) -> CoordinatorState:
    """Returns the first state of a coordinator, with the first state of the membership protocol.

    The last step of a checkpoint counts as told and validated: every worker begins after it.
    """
    begun = membership.committed
    told = CommitMessage(begun, 1.0, "step") if begun >= 0 else None
    preparation = Preparation(now_ns, elastic=job.elastic)
    return CoordinatorState(job, membership, validated=begun, told=told, preparation=preparation, kept_ns=now_ns)


def first_state(job: Job, ownership: Ownership, at_ns: int, begun: int = -1, later_ns: int = 0) -> CoordinatorState:
    """Returns the state of the coordinator of a job before a worker has joined; `begun` is the step of a checkpoint.

    The end of a process may be seen `later_ns` later than on one host.
    """
    # A worker may take minutes to build a model and to open its data, and no worker can take over before training.
    patience_ns = _PATIENCE_S * 1_000_000_000
    options = Options(
        stages=job.slots,
        noun=job.slot_noun,
        redundant=job.redundancy != "none",
        sharded=job.fsdp > 0,
        form_ns=patience_ns,
        max_restarts=_MAX_RESTARTS,
        workers=len(ownership.workers()),
        begun=begun,
        silence_ns=required(parse_duration(job.silent_after), "a duration is checked"),
        hang_ns=required(parse_duration(job.hang_after), "a duration is checked"),
    )
    options = replace(options, look_ns=options.look_ns + later_ns)
    if job.redundancy == "none" and job.pipelines == 1:
        # A verdict on a slow worker would only end the run. A transfer that breaks while both its workers live cannot
        # be repaired.
        options = replace(options, hang_ns=patience_ns, first_ns=patience_ns, stall_ns=patience_ns)
        options = replace(options, silence_ns=patience_ns // 10, max_repeats=0)
    shadows = ownership.shadows or tuple(() for _ in ownership.owners)
    return begin(job, membership_state.begin(options, ownership.owners, shadows, job.steps - 1, at_ns), at_ns)


def documents(state: CoordinatorState) -> dict[str, str]:
    """Returns the value of each key in the store, as one line of JSON."""
    facts = {name: getattr(state, name) for name in ("started", "validated", "kept", "raised", "codes", "deadly")}
    found = {STATE: membership_state.to_json(state.membership), FACTS: json.dumps(facts, sort_keys=True)}
    return found if state.commit is None else found | {COMMIT: json.dumps(state.commit._asdict())}


def _raised(step: int, kind: str, words: str, of_gpu: list[int] | None) -> Raised:
    return Raised(step, kind, words, None if of_gpu is None else tuple(of_gpu))


def resume(job: Job, found: Mapping[str, str], now_ns: int) -> CoordinatorState:
    """Returns the state that another coordinator has kept in `documents`, on this one's clock.

    Raises InvariantError if one of them is of another form.
    """
    membership = membership_state.resume(found[STATE], now_ns)
    try:
        facts = json.loads(found[FACTS])
        commit = Commit(**json.loads(found[COMMIT])) if COMMIT in found else None
        raised = {int(worker): _raised(*each) for worker, each in facts["raised"].items()}
        codes = {int(worker): int(code) for worker, code in facts["codes"].items()}
        new = begin(job, membership, now_ns)._replace(
            started=int(facts["started"]),
            validated=int(facts["validated"]),
            kept=int(facts["kept"]),
            raised=raised,
            codes=codes,
            deadly=str(facts["deadly"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvariantError(f"these are no facts and no commit of a coordinator: {error!r}") from error
    if commit is not None and commit.step <= membership.committed:  # not one of a life before
        then: Literal["end", "step"] = "end" if membership.is_over else "step"
        told = CommitMessage(commit.step, commit.clip_factor, then, keep=new.kept == commit.step)
        new = new._replace(commit=commit, told=told)
    return new._replace(owners=membership.owners)

"""The state of the coordinator: one immutable value; the store keeps the part of it that another coordinator needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from engine.core.checkpoint_rules import KeepRule, keeping_of
from engine.core.errors import required
from engine.core.history.process_records import DeadlyRecord
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.job.torch_parts import PLATEAU
from engine.core.job.update_rules import monitor_rules
from engine.core.messages import (
    BorderMessage,
    BorderSpecs,
    CommitMessage,
    EpochMessage,
    NextGroupFormedMessage,
    NextGroupMessage,
)
from engine.core.monitors import NO_MONITORS, MonitorRules, Monitors, needs_validations
from engine.core.ownership import Ownership, healed
from engine.core.program.ballot import Ballot, Commit
from engine.core.program.inventory import PlanMessage
from engine.core.protocol import state as membership_state
from engine.core.protocol.inputs_outputs import CoordinatorOutput, Note, Place, Write
from engine.core.protocol.rebalancing import LeaveStrategy
from engine.core.protocol.state import Options, Phase, State
from engine.core.protocol.verdicts import NO_MORE, deadly_hosts, deadly_in_words
from engine.core.protocol.worker_times import MoveCosts
from engine.core.units import parse_duration

# The borders between the stages, as the coordinator learns them: what each stage returns for the border before it.
#
# Rules: owners try all stages at once behind the border of the first one, which is the true one before most stages of
# most models. A result behind a wrong border does not count: the owner learns the true one and tries again.
#
#     stage 0    its data -> A    told to all owners
#     stage 1    A -> A           true, as the border before it is A
#     stage 2    A -> B           true
#     stage 3    A -> A           the border before it is B, which its owner is told: B -> B


class Borders(NamedTuple):
    """The borders that are known, those behind the first stages; `learnt` has the last word about each stage."""

    known: tuple[BorderSpecs, ...] = ()
    learnt: Mapping[int, BorderMessage] = {}

    def learn(self, border: BorderMessage) -> Borders:
        """Returns the borders after a word of an owner."""
        known, learnt = self.known, {**self.learnt, border.stage: border}
        while (following := learnt.get(len(known))) is not None and following.before == known[-1:]:
            known = (*known, following.behind)
        return Borders(known, learnt)


# The group of a coming epoch, which members and joiners form while training continues.
#
#     coordinator                          members and joiners
#     NextGroupMessage(number) --------->  form the group in a thread, beside the present one
#     <------------ NextGroupFormedMessage
#     then the epoch is prepared as any other, and the workers enter the group with it
#
# Rules: no member waits for a joiner: steps are committed until all have answered. An attempt is given up when an epoch
# comes first, other workers want to join, or one of them fails. After a failure the next attempt begins with the next
# commit, at most three for the same workers; then the joiners wait for an epoch that forms its own group. A new
# coordinator makes such an epoch first, so the numbers of an epoch are those of one coordinator.


_MOST_FAILURES = 3


class NextGroup(NamedTuple):
    """The last attempt; without `members` it was given up."""

    epoch: int = 0
    number: int = 0
    members: tuple[int, ...] = ()
    formed: frozenset[int] = frozenset()  # the workers that have answered
    failures: int = 0  # of attempts for the epoch with these members
    failed_after: int | None = None  # the last commit before the last failure
    is_entered: bool = False  # the last commit has begun the epoch

    @property
    def is_formed(self) -> bool:
        """Whether all have answered."""
        return bool(self.members) and self.formed.issuperset(self.members)


def attempted(group: NextGroup, state: State) -> tuple[NextGroup, NextGroupMessage | None]:
    """Returns the attempt that fits the state, and the order to the workers if it is another one."""
    members, epoch = _wanted(state), state.epoch + 1
    if group.epoch != epoch and not members:
        return NextGroup(), None  # no attempt is open: those of an earlier epoch ended with the epoch behind it
    if (group.epoch, group.members) == (epoch, members):
        is_again = group.failed_after is not None and state.committed > group.failed_after
        if not is_again or group.failures == _MOST_FAILURES:
            return group, None
        new = group._replace(number=group.number + 1, formed=frozenset(), failed_after=None)
    else:
        new = NextGroup(epoch, group.number + 1 if group.epoch == epoch else 1, members)
    return new, NextGroupMessage(new.epoch, new.number, new.members)


def after_answer(
    group: NextGroup, state: State, worker: int, answer: NextGroupFormedMessage
) -> tuple[NextGroup, NextGroupMessage | None]:
    """Returns the attempt after the answer of a worker, and the order to give it up if it failed there."""
    is_open = group.failed_after is None and (group.epoch, group.number) == (answer.epoch, answer.number)
    if not is_open or worker not in group.members:
        return group, None
    if not answer.failure:
        return group._replace(formed=group.formed | {worker}), None
    new = group._replace(failures=group.failures + 1, failed_after=state.committed, formed=frozenset())
    return new, NextGroupMessage(group.epoch, group.number, ())


def ready_joiners(group: NextGroup, state: State) -> tuple[int, ...]:
    """Returns the workers that can join with the commit of the open step: the group has formed with them."""
    is_due = group.is_formed and group.epoch == state.epoch + 1 and group.members == _wanted(state)
    return state.joiners if is_due else ()


def _wanted(state: State) -> tuple[int, ...]:
    """Returns the members of the group that is wanted; none if no worker can join with the coming commit."""
    is_last = state.committed + 1 >= state.last_step
    if not state.waiting or state.phase is not Phase.RUNNING or is_last or not (joiners := state.joiners):
        return ()
    return tuple(sorted((*state.members, *joiners)))


# Rules: `documents` are the values of keys in the store, and `resume` makes a state of them. The ballot and the
# preparation are not kept: a coordinator that takes over begins an epoch, and in a new epoch all votes come again.

_keeping_of = lru_cache(maxsize=64)(keeping_of)
_PATIENCE_S = 600  # with a start that is slow, or with workers that nobody could replace
_MAX_RESTARTS = 3  # of the workers, if one of them dies before the first commit
ROLE, STATE, COMMIT, FACTS = "coordinator", "state", "commit", "facts"  # keys in the store
READERS = ("epoch", "status", "reconfigured", "verdicts", "plan", "members/", "heartbeats")  # others, and prefixes


class RaisedException(NamedTuple):
    """An exception: open step, kind, words behind "worker N", and the worker's slots if its GPU had failed."""

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
    raised: Mapping[int, RaisedException] = {}
    codes: Mapping[int, int] = {}  # the exit codes of workers that have ended
    deadly: str = ""  # the deadly hosts as last told, in words
    monitors: Monitors = NO_MONITORS  # as of the last commit and the last validation
    # The following is not in the store.
    rules: MonitorRules = MonitorRules(0)  # of the job
    kept_ns: int = 0  # when that step was committed; at first when the coordinator began
    borders: Borders = Borders()
    ballot: Ballot | None = None  # None while no vote counts
    preparation: Preparation = Preparation(0)
    costs: MoveCosts = MoveCosts()  # of replicas that were sent, and the sizes of slots: they tell the rate of links
    sizes: Mapping[int, StageBytes] = {}
    next_group: NextGroup = NextGroup()
    epoch: EpochMessage | None = None  # the last one that was sent
    planned: int = 0  # the last epoch whose plan was sent
    plan: PlanMessage | None = None  # the last one
    grid: PlanMessage | None = None  # that of the last epoch in which training began, which all its members have
    leaving: tuple[int, ...] = ()  # in the last plan
    wanted: tuple[int, ...] = ()  # in the last plan
    hosts: tuple[int, ...] = ()  # in the last plan
    told: CommitMessage | None = None  # the last one that was sent
    owners: tuple[int, ...] = ()  # as last recorded
    places: Mapping[int, Place] = {}
    graces_ns: Mapping[int, int] = {}  # of workers that have given notice
    restarts: int = 0  # that were ordered
    ways: Mapping[int, LeaveStrategy] = {}  # of workers that have given notice, as last told
    staying: Mapping[int, str] = {}  # workers that have given notice and cannot leave, and why
    let_go: tuple[int, ...] = ()  # workers that may end after their last words
    is_released: bool = False
    is_stopping: bool = False

    @property
    def keeping(self) -> KeepRule:
        """The rule by which commits are kept as checkpoints."""
        return required(_keeping_of(self.job.checkpoint_every), "the field checkpoint_every is checked")

    @property
    def ownership(self) -> Ownership:
        """The owners and shadows by the last decision."""
        return Ownership(self.job.grid, self.membership.owners, self.membership.shadows)


def begin(job: Job, membership: State, now_ns: int, before: Monitors = NO_MONITORS) -> CoordinatorState:
    """Returns the first state of a coordinator, with the first state of the membership protocol.

    The last step of a checkpoint, which had the monitors `before`, counts as sent, and as validated unless it is
    needed.
    """
    begun, rules = membership.committed, monitor_rules(job)
    told = CommitMessage(begun, 1.0, "step") if begun >= 0 else None
    preparation = Preparation(now_ns, elastic=job.elastic)
    monitors = before.begun(rules, begun)
    if monitors.ends_at >= 0:
        membership = membership._replace(last_step=min(membership.last_step, monitors.ends_at))
    validated = min(begun, monitors.validated) if needs_validations(rules) else begun
    if job.predict_args:
        validated = begun - 1  # its only pass follows the step that it begins with
    first = CoordinatorState(job, membership, validated=validated, told=told, preparation=preparation, kept_ns=now_ns)
    return first._replace(monitors=monitors, rules=rules)


def commit_message(commit: Commit, then: Literal["step", "end", "epoch"], *, keep: bool, job: Job) -> CommitMessage:
    """Returns the message about a commit; it has the rate only if that follows a plateau."""
    lr = commit.lr if job.lr_schedule == PLATEAU and commit.lr is not None else -1.0
    monitored = () if commit.monitored is None else (commit.monitored,)
    return CommitMessage(commit.step, commit.clip_factor, then, keep, lr, monitored)


def first_state(
    job: Job, ownership: Ownership, at_ns: int, begun: int = -1, later_ns: int = 0, before: Monitors = NO_MONITORS
) -> CoordinatorState:
    """Returns the coordinator's state before a worker joins; exits may be seen `later_ns` later than on one host.

    `begun` is the step of a checkpoint, which had the monitors `before`.
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
        most_workers=job.max_workers,
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
    return begin(job, membership_state.begin(options, ownership.owners, shadows, job.steps - 1, at_ns), at_ns, before)


def resumed(
    job: Job, membership: State, facts: Mapping[str, Any], commit: Commit | None, now_ns: int
) -> CoordinatorState:
    """Returns the state that goes on from that of another coordinator: its `facts`, by name, and its last commit."""
    new = begin(job, membership, now_ns)._replace(**facts)
    if commit is not None and commit.step <= membership.committed:  # not one of a life before
        then: Literal["end", "step"] = "end" if membership.is_over else "step"
        told = commit_message(commit, then, keep=new.kept == commit.step, job=job)
        new = new._replace(commit=commit, told=told)
    return new._replace(owners=membership.owners)


# The placement of the next step: the shadows that the heal will have made, and the deadly hosts.
#
# The coordinator names these when training begins, and whenever others become deadly. A host that is deadly only until
# the heal is done is not named.

_healed = lru_cache(maxsize=256)(healed)


def healed_soon(state: CoordinatorState, ownership: Ownership) -> Ownership:
    """Returns the ownership in the step after this one, as the workers compute it too."""
    job, given = state.job, (state.membership.members, state.leaving, state.wanted, state.hosts)
    return _healed(ownership, job.redundancy, job.redundancy_level, *given)


def warned_of(state: CoordinatorState, soon: Ownership) -> tuple[CoordinatorState, tuple[CoordinatorOutput, ...]]:
    """Returns the state and the warning about the deadly hosts of an ownership, if they are others than before."""
    hosts = deadly_hosts(state.membership._replace(owners=soon.owners, shadows=soon.shadows))
    text = deadly_in_words(hosts, state.job.slot_noun)
    if text == state.deadly:
        return state, ()
    record = DeadlyRecord(hosts=tuple(hosts), text=text or NO_MORE)
    return state._replace(deadly=text), (Note(record.text), Write(record))

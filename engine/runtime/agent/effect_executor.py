"""Carries out what the coordinator has ordered: tells the workers, and kills whom a verdict has put out.

Rule: an order says what shall be, and may come again; whoever has been told already is not told twice.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from typing import Any

from engine.core.config.job import Job
from engine.core.history.run_records import CommitRecord, EpochRecord, GoRecord, HeirsRecord, PlanRecord
from engine.core.membership.effects import (
    Commit,
    Effect,
    Evict,
    Fence,
    GatherInventories,
    Look,
    OrderHandOver,
    PublishEpoch,
    PublishPlanInput,
    StartTraining,
)
from engine.core.membership.state import GATHERING, Phase, State
from engine.core.ownership import Grid, Ownership
from engine.core.recovery.ballot import Commit as Committed
from engine.runtime.agent.run_state import Account, Epoch
from engine.runtime.agent.worker_handles import Member, RendezvousStore, tell_all
from engine.runtime.ipc.link import Message
from engine.runtime.ipc.recorder import Recorder, now_ns

_TRAINING = (Phase.RUNNING, Phase.DRAINING)


class Orders:
    """Carries out orders for one job, over members that have been started."""

    def __init__(
        self, job: Job, members: dict[int, Member], recorder: Recorder, account: Account, store: RendezvousStore
    ):
        self.store = store
        self.members = members
        self.recorder = recorder
        self.account = account
        self.grid = Grid(job.stages, job.microbatches, job.pipelines)
        self.decided: Committed | None = None  # by the ballot, and not yet told
        self._epoch: Message = {"epoch": 0}
        self._planned, self._started = 0, 0  # the epochs in which plan and go were told
        self._leaving: tuple[int, ...] = ()  # as the workers know them
        self._told: Message | None = None  # the last commit
        self._owners: tuple[int, ...] = ()  # as recorded

    def carry_out(self, effect: Effect, state: State) -> None:
        """Does what an order says; `state` is the one that it was read off."""
        _CARRY_OUT[type(effect)](self, effect, state)

    def broadcast(self, kind: str, **fields: Any) -> None:
        """Tells every worker that has not ended: who owns the first stage first, for the others wait for it."""
        tell_all(sorted(self.members.values(), key=_first_stage), kind, **fields)

    def _publish_epoch(self, effect: PublishEpoch, state: State) -> None:
        if effect.epoch <= self._epoch["epoch"]:
            return
        # The workers first: each of them is waiting for it.
        self._epoch = {
            "epoch": effect.epoch,
            "members": effect.members,
            "gather": state.phase in GATHERING,
            "regroup": state.phase is Phase.FAILING_OVER,
            "store_port": self.store.port,  # the group of this epoch is formed there, whatever there was before
            "commit": self._told,  # whoever was taken out of waiting for it has it from here
            "digest": None if state.phase in GATHERING else next(iter(state.digests.values()), None),
            "go": self._go(state) if state.phase in _TRAINING else None,  # nothing is left to wait for
        }
        at_ns = now_ns()
        self._note_owners(state)
        self.broadcast(**self._epoch_message())
        self.account.freeze()
        self.recorder.write(
            EpochRecord(
                at_ns=at_ns,
                epoch=effect.epoch,
                members=effect.members,
                verdict=effect.verdict,
                reason=effect.reason,
                planned=effect.planned,
                owners=state.owners,
                shadows=state.shadows,
            )
        )
        self.account.epochs.append(Epoch(effect.epoch, effect.verdict, effect.reason))

    def _note_owners(self, state: State) -> None:
        self._owners = state.owners
        ownership = self._ownership(state)
        for worker in state.members:
            self.members[worker].slots = ownership.slots_of(worker)

    def _epoch_message(self) -> Message:
        return {"kind": "epoch", **self._epoch}

    def _ownership(self, state: State) -> Ownership:
        return Ownership(self.grid, state.owners, state.shadows)

    def _fence(self, effect: Fence, state: State) -> None:
        member = self.members.get(effect.worker)
        if member is not None and member.exit_code is None and self._epoch["epoch"]:
            member.link.send(**self._epoch_message())

    def _send_plan(self, effect: PublishPlanInput, state: State) -> None:
        if effect.epoch <= self._planned:
            return
        self._planned = effect.epoch
        self._leaving = effect.leaving
        at_ns = now_ns()
        if effect.owners != self._owners:  # an heir that was not known of before it said what it holds
            self._note_owners(state)
            heirs = HeirsRecord(at_ns=at_ns, epoch=effect.epoch, owners=effect.owners, shadows=effect.shadows)
            self.recorder.write(heirs)
        is_prepared = state.phase not in GATHERING
        if not is_prepared:
            self.broadcast("plan", **_document(effect))
        plan = PlanRecord(at_ns=at_ns, epoch=effect.epoch, committed=effect.committed, prepared=is_prepared)
        self.recorder.write(plan)

    def prepare(self, number: int, document: PublishPlanInput) -> None:
        """Has every worker make a plan before its epoch begins; it answers under the same number."""
        self.broadcast("prepare", number=number, **_document(document))

    def _start_training(self, effect: StartTraining, state: State) -> None:
        if effect.epoch <= self._started:
            return
        self._started = effect.epoch
        self.account.open(effect.epoch, self._ownership(state))
        at_ns = now_ns()
        go = self._go(state)
        if self._epoch["go"] is None:
            self.broadcast("go", **go)
        self.recorder.write(GoRecord(at_ns=at_ns, epoch=effect.epoch, end=go["end"]))
        self.account.going_at_ns = self.account.going_at_ns or at_ns
        for worker in state.members:
            self.members[worker].state = "running"

    def _go(self, state: State) -> Message:
        """Returns what a worker needs to know, beside the plan, to go on."""
        validate = self.account.owes_validation(state.committed >= state.last_step)
        return {"end": state.phase is Phase.DRAINING, "validate": validate}

    def _send_commit(self, effect: Commit, state: State) -> None:
        commit, self.decided = self.decided, None
        if commit is None:
            return  # the order is repeated, and everybody has it, or it was in the plan
        assert commit.step == effect.step
        self.account.settle(commit)
        self._told = {
            "step": commit.step,
            "loss": commit.loss,
            "clip_factor": commit.clip_factor,
            "last": effect.then == "end",
            "then": effect.then,
        }
        at_ns = now_ns()  # before anybody can do anything after it
        self.broadcast("commit", **self._told)
        self.recorder.write(CommitRecord(at_ns=at_ns, **asdict(commit), last=self._told["last"]))
        if effect.then == "step":
            self.account.heal(state.members, self._leaving)

    def _evict(self, effect: Evict, state: State) -> None:
        member = self.members[effect.worker]
        if member.exit_code is None:
            member.child.signal(signal.SIGKILL)

    def _need_not(self, effect: Effect, state: State) -> None:
        """What it orders is done anyway: who is told of an epoch says what it holds; the loop watches every process."""


def _first_stage(member: Member) -> float:
    return min((stage for _, stage in member.slots), default=inf)


def _document(effect: PublishPlanInput) -> Message:
    """Returns what the workers make the plan from."""
    return {name: value for name, value in asdict(effect).items() if name != "verdict"}


_CARRY_OUT: dict[type[Effect], Callable[[Orders, Any, State], None]] = {
    PublishEpoch: Orders._publish_epoch,
    GatherInventories: Orders._need_not,
    PublishPlanInput: Orders._send_plan,
    StartTraining: Orders._start_training,
    Commit: Orders._send_commit,
    OrderHandOver: Orders._need_not,
    Evict: Orders._evict,
    Fence: Orders._fence,
    Look: Orders._need_not,
}

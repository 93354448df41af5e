"""The effect executor: sends the effects of the membership protocol to the workers, and kills excluded workers.

Rule: an effect states a result and may come again. The second time it sends nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from math import inf
from typing import Any

from engine.core import messages
from engine.core.config.job import Job
from engine.core.errors import ensure, required
from engine.core.history.run_records import CommitRecord, EpochRecord, GoRecord, HeirsRecord, PlanRecord
from engine.core.membership.effects import (
    AnnounceCommit,
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
from engine.core.message_codec import ToWorker
from engine.core.ownership import Grid, Ownership
from engine.core.recovery.ballot import Commit as Committed
from engine.runtime.agent.run_state import Epoch, RunState
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all
from engine.runtime.ipc.recorder import Recorder, now_ns

_TRAINING = (Phase.RUNNING, Phase.DRAINING)


class EffectExecutor:
    """Carries out the effects of the membership protocol for the started workers of a job."""

    def __init__(
        self,
        job: Job,
        members: dict[int, WorkerHandle],
        recorder: Recorder,
        run_state: RunState,
    ):
        self.members = members
        self.recorder = recorder
        self.run_state = run_state
        self.grid = Grid(job.stages, job.microbatches, job.pipelines)
        self._decided: Committed | None = None  # by the ballot; not announced yet
        self._epoch: messages.EpochMessage | None = None
        self._planned, self._started = 0, 0  # the last epochs whose plan and go were sent
        self._leaving: tuple[int, ...] = ()  # in the last plan
        self._told: messages.CommitMessage | None = None  # the last one that was sent
        self._owners: tuple[int, ...] = ()  # as last recorded

    def execute(self, effect: Effect, state: State) -> None:
        """Carries out one effect of `state`."""
        _EXECUTE[type(effect)](self, effect, state)

    def decided(self, commit: Committed) -> None:
        """Keeps the commit that the ballot has decided until the coordinator announces it."""
        self._decided = commit

    def broadcast(self, message: ToWorker) -> None:
        """Sends a message to every live worker, to owners of the first stage first: the others wait for them."""
        tell_all(sorted(self.members.values(), key=_first_stage), message)

    def _publish_epoch(self, effect: PublishEpoch, state: State) -> None:
        if self._epoch is not None and effect.epoch <= self._epoch.epoch:
            return
        self._epoch = messages.EpochMessage(
            epoch=effect.epoch,
            members=effect.members,
            gather=state.phase in GATHERING,
            regroup=state.phase is Phase.FAILING_OVER,
            commit=self._told,  # for a worker whose wait for it ends with the epoch
            digest=None if state.phase in GATHERING else next(iter(state.digests.values()), None),
            go=self._go(state) if state.phase in _TRAINING else None,  # then no answer is awaited
        )
        at_ns = now_ns()
        self._note_owners(state)
        self.broadcast(self._epoch)  # before the records, because the workers wait for it
        self.run_state.freeze()
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
        self.run_state.epochs.append(Epoch(effect.epoch, effect.verdict, effect.reason))

    def _note_owners(self, state: State) -> None:
        self._owners = state.owners
        ownership = self._ownership(state)
        for worker in state.members:
            self.members[worker].slots = ownership.slots_of(worker)

    def _ownership(self, state: State) -> Ownership:
        return Ownership(self.grid, state.owners, state.shadows)

    def _fence(self, effect: Fence, state: State) -> None:
        member = self.members.get(effect.worker)
        if member is not None and member.exit_code is None and self._epoch is not None:
            member.link.send(self._epoch)

    def _send_plan(self, effect: PublishPlanInput, state: State) -> None:
        if effect.epoch <= self._planned:
            return
        self._planned = effect.epoch
        document = effect.document
        self._leaving = document.leaving
        at_ns = now_ns()
        if document.owners != self._owners:  # an heir became known by its inventory
            self._note_owners(state)
            heirs = HeirsRecord(at_ns=at_ns, epoch=effect.epoch, owners=document.owners, shadows=document.shadows)
            self.recorder.write(heirs)
        is_prepared = state.phase not in GATHERING
        if not is_prepared:
            self.broadcast(document)
        plan = PlanRecord(at_ns=at_ns, epoch=effect.epoch, committed=document.committed, prepared=is_prepared)
        self.recorder.write(plan)

    def prepare(self, number: int, document: messages.PlanMessage) -> None:
        """Lets every worker make the plan of a coming epoch; its answer has the same number."""
        self.broadcast(messages.PrepareMessage(number, document))

    def _start_training(self, effect: StartTraining, state: State) -> None:
        if effect.epoch <= self._started:
            return
        self._started = effect.epoch
        self.run_state.open(effect.epoch, self._ownership(state))
        at_ns = now_ns()
        go = self._go(state)
        epoch = required(self._epoch, "training starts in an epoch")
        if epoch.go is None:
            self.broadcast(go)
        self.recorder.write(GoRecord(at_ns=at_ns, epoch=effect.epoch, end=go.end))
        self.run_state.going_at_ns = self.run_state.going_at_ns or at_ns
        for worker in state.members:
            self.members[worker].state = "running"

    def _go(self, state: State) -> messages.GoMessage:
        """Returns the message that lets workers run their plan."""
        return messages.GoMessage(
            end=state.phase is Phase.DRAINING,
            validate=self.run_state.owes_validation(state.committed >= state.last_step),
        )

    def _send_commit(self, effect: AnnounceCommit, state: State) -> None:
        commit, self._decided = self._decided, None
        if commit is None:
            return  # a repeated effect: the commit was sent before, or with the epoch
        ensure(commit.step == effect.step, f"commit of step {commit.step} where {effect.step} is announced")
        self.run_state.settle(commit)
        self._told = messages.CommitMessage(commit.step, commit.clip_factor, effect.then)
        at_ns = now_ns()  # before a worker can act on the commit
        self.broadcast(self._told)
        self.recorder.write(CommitRecord(at_ns=at_ns, **commit._asdict(), last=effect.then == "end"))
        if effect.then == "step":
            self.run_state.heal(state.members, self._leaving)

    def _evict(self, effect: Evict, state: State) -> None:
        member = self.members[effect.worker]
        if member.exit_code is None:
            member.child.signal(signal.SIGKILL)

    def _ignore(self, effect: Effect, state: State) -> None:
        """Does nothing: an epoch asks for inventories already, and the event loop watches every process."""


def _first_stage(member: WorkerHandle) -> float:
    return min((stage for _, stage in member.slots), default=inf)


_EXECUTE: dict[type[Effect], Callable[[EffectExecutor, Any, State], None]] = {
    PublishEpoch: EffectExecutor._publish_epoch,
    GatherInventories: EffectExecutor._ignore,
    PublishPlanInput: EffectExecutor._send_plan,
    StartTraining: EffectExecutor._start_training,
    AnnounceCommit: EffectExecutor._send_commit,
    OrderHandOver: EffectExecutor._ignore,
    Evict: EffectExecutor._evict,
    Fence: EffectExecutor._fence,
    Look: EffectExecutor._ignore,
}

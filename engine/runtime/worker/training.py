"""The training of one worker: step after step; after each failure, a recovery in a new epoch.

A recovery, as a surviving worker sees it:

    EpochMessage ->   leaves its wait (Fenced) or ends its action, and stops there: phase "fence"
                      names the values that it holds of the open step              -> InventoryMessage
                      closes the old plane; a thread forms the new group: phase "regroup"
    PlanMessage ->    takes the last commit, if it missed it, and makes the plan   -> PlannedMessage (digest)
                      adopts the slots that it now owns, drops other replicas: phase "plan"
    GoMessage ->      waits for the new group, then runs the rest of the open step by the plan
    CommitMessage ->  runs the next step with new shadows ("heal"); all later steps are usual ones

Rules: from its inventory to the plan or a newer epoch, a worker takes no step and no commit. A broken transfer is only
a suspicion: the worker reports it, and the next epoch has the verdict. A prepared epoch begins with a commit and names
a plan that every member has made in advance, from the inventories after that commit. No inventory is sent, and a worker
with another inventory stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

from engine.core import messages
from engine.core.config.job import is_due
from engine.core.errors import InvariantError, TransferFailedError
from engine.core.history.run_records import MarkRecord, MovedRecord
from engine.core.message_codec import CUT, cut, in_messages
from engine.core.ownership import Ownership, Slot
from engine.core.process_messages import ByeMessage
from engine.core.recovery.inventory import to_json
from engine.runtime.ipc.control import Fenced
from engine.runtime.stage.state_hash import marked_hash
from engine.runtime.transport.group_formation import GroupFormation
from engine.runtime.transport.transport import Transport
from engine.runtime.transport.worker_program import WorkerProgram
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.planner_thread import PlannerThread, PreparedPlan
from engine.runtime.worker.validation import Validation
from engine.runtime.worker.worker_context import WorkerContext

_MARKS_PER_ROW, _MOST_OF_NAME = 100, 300  # bytes of the name of a tensor; a row must fit into a message


class Excluded(Exception):
    """This worker is not a member of the epoch: a verdict has excluded it, or it leaves after its notice."""


class Training:
    """The training of one worker; `ownership` is the ownership of the open step."""

    def __init__(self, context: WorkerContext, ownership: Ownership, plane: Transport):
        self.context = context
        self.ownership = ownership
        self._plane = plane
        self._forming: GroupFormation | None = None
        self._executor = Executor(context)
        self._planner = PlannerThread(context, ownership.grid)
        self._members: tuple[int, ...] = ownership.workers()
        self._leaving: tuple[int, ...] = ()
        self._program: Literal["usual", "plan", "heal"] = "usual"
        self._is_over = False
        self._audited = -1  # the last step whose audit is done or not due

    def run(self) -> None:
        """Trains to the end of the job, after the ReadyMessage of this worker; raises Stopped or Excluded."""
        control = self.context.control
        while True:
            try:
                self._enter_next_epoch()
                while not self._is_over:
                    self._advance()
                return self._finish()
            except Fenced:
                continue
            except TransferFailedError as suspicion:
                control.send(messages.SuspicionMessage(control.accepted, str(suspicion), suspicion.peer))

    def _advance(self) -> None:
        """Runs the open step, and the audit, the validation and the heal after its commit."""
        commit = self._run_step()
        self._is_over = commit.then == "end"
        self._drop_others()  # a replica without a part in the step has missed it
        self._audit(commit, self.ownership.held_by(self.context.worker))
        if commit.then == "epoch":
            self._enter_next_epoch()  # it follows at once; its GoMessage orders the validation of this step
            return
        if is_due(self.context.job.validate_every, commit.step, self._is_over):
            self._validate(commit.step)
        if self._program != "usual" and not self._is_over:
            self._heal()

    def _run_step(self) -> messages.CommitMessage:
        """Runs the open step; in a recovery it records the bytes sent, even if the step is interrupted."""
        step, before = self._executor.step, self._plane.bytes_sent
        try:
            return self._executor.run_step()
        finally:
            if self._program != "usual":
                plan = self._program == "plan"
                num_bytes = self._plane.bytes_sent - before if plan else self._executor.end.bytes_healed
                at = {"epoch": self.context.control.accepted, "step": step}
                self.context.recorder.write(MovedRecord(program=self._program, **at, bytes=num_bytes))

    def _finish(self) -> None:
        context = self.context
        slots = self.ownership.slots_of(context.worker)
        peaks = tuple((*slot, context.replicas.stages[slot].peak_stash) for slot in slots)
        context.control.send(messages.FinishedMessage(context.control.accepted, peaks, _peak_memory_kib()))
        context.control.take(ByeMessage)  # comes when all workers have finished: no transfer is open
        self._plane.close()

    def _enter_next_epoch(self) -> None:
        """Waits for an epoch and enters it; raises Fenced if a newer epoch comes before training can go on."""
        context, control = self.context, self.context.control
        epoch = control.next_epoch()
        control.at = (*control.at[:2], False)
        if context.worker not in epoch.members:
            raise Excluded
        worker_program: WorkerProgram | None = None
        if epoch.gather:
            worker_program = self._make_plan(epoch)
        elif epoch.digest is not None:
            worker_program = self._take_prepared_plan(epoch)
        go = epoch.go or control.take(messages.GoMessage)
        if self._forming is not None:
            self._plane = self._forming.plane()
            self._forming = None
        self._plane.epoch = epoch.epoch
        self._program = "usual" if worker_program is None else "plan"
        self._is_over = go.end
        self._begin(worker_program or self._planner.default_program(self.ownership))
        if go.validate:
            self._validate(self._executor.step - 1)

    def _begin(self, worker_program: WorkerProgram) -> None:
        """Enters a program. In a recovery it also starts to plan the step after it, in the planner thread."""
        self._executor.enter(self._plane, worker_program)
        if self._program != "usual" and not self._is_over:
            self._planner.plan_next_step(self._executor.step, self.ownership, self._members, self._leaving)

    def _mark(self, phase: messages.OwnPhase, adopted: tuple[Slot, ...] | None = None) -> None:
        self.context.control.mark(phase)
        self.context.recorder.write(MarkRecord(phase=phase, epoch=self.context.control.accepted, adopted=adopted))

    def _make_plan(self, epoch: messages.EpochMessage) -> WorkerProgram:
        """Sends this worker's inventory, and makes the plan from the inventories of all workers."""
        context, control = self.context, self.context.control
        self._mark("fence")
        inventory = self._executor.inventory()
        whole = self.ownership.grid.places(inventory.whole)
        control.send(messages.InventoryMessage(control.accepted, to_json(inventory), whole))
        self._mark("inventory")
        if epoch.regroup:
            if self._forming is not None:
                self._forming.give_up()
            self._plane.abandon()
            self._forming = GroupFormation(control, context.backend, context.recorder, epoch)
        planned = self._planner.plan(control.take(messages.PlanMessage))
        self._catch_up(planned, epoch.commit)
        control.send(messages.PlannedMessage(control.accepted, planned.plan.digest, planned.plan.lost_stages))
        self._take_over(planned, epoch.commit)
        return self._planner.worker_program(planned)

    def _take_prepared_plan(self, epoch: messages.EpochMessage) -> WorkerProgram:
        """Takes the plan that was made before its epoch; raises InvariantError if the inventory here is another."""
        self._mark("fence")
        planned, worker_program = self._planner.take_prepared(epoch)
        self._catch_up(planned, epoch.commit)
        worker, holds = self.context.worker, to_json(self._executor.inventory())
        if (worker, holds) not in planned.told.inventories:
            raise InvariantError(f"worker {worker} holds {holds}, another inventory than in epoch {epoch.epoch}")
        self._take_over(planned, epoch.commit)
        return worker_program

    def _catch_up(self, planned: PreparedPlan, commit: messages.CommitMessage | None) -> None:
        """Takes the ownership of the epoch, and the last commit if this worker has missed it."""
        self.ownership = planned.ownership
        self._members, self._leaving = planned.told.members, planned.told.leaving
        self._executor.catch_up(commit)
        if commit is not None and commit.step > self._audited:
            held = self.ownership.held_by(self.context.worker)
            whole = self.context.replicas.whole()
            self._audit(commit, [slot for slot in held if slot in whole])

    def _take_over(self, planned: PreparedPlan, commit: messages.CommitMessage | None) -> None:
        """Takes over slots as the plan says, unless a stage is lost."""
        plan, replicas = planned.plan, self.context.replicas
        if not plan.lost_stages:
            adopted = [slot for slot in plan.adopted if self.ownership.owner(*slot) == self.context.worker]
            for slot in adopted:
                replicas.adopt(slot)
            if commit is not None:
                self._audit(commit, adopted)
            self._drop_others()
        self._mark("plan", adopted=plan.adopted)

    def _drop_others(self) -> None:
        """Drops the replicas of slots that this worker neither owns nor shadows in the open step."""
        replicas = self.context.replicas
        for slot in replicas.stages.keys() - set(self.ownership.held_by(self.context.worker)):
            replicas.drop(slot)

    def _heal(self) -> None:
        """Opens the next step with all shadows: one step with HEALs if some of them are new, then usual steps."""
        next_step = self._planner.next_step()
        self.ownership = next_step.ownership
        self._program = "heal" if next_step.is_healing else "usual"
        self._begin(next_step.worker_program)

    def _validate(self, step: int) -> None:
        """Runs a validation pass. No worker begins the next step before the result: until then it can be redone."""
        control = self.context.control
        with self.context.shards.all_whole() if self.context.shards else contextlib.nullcontext():
            result = Validation(self.context, self._plane, self.ownership).run()
        if result is not None:
            control.send(messages.ValidationMessage(step, result.loss, result.metric))
        control.take(messages.ValidatedMessage)

    def _audit(self, commit: messages.CommitMessage, slots: Sequence[Slot]) -> None:
        """Sends the agent the hash of every layer of these replicas, if an audit is due after the step."""
        self._audited = commit.step
        if not is_due(self.context.job.audit, commit.step, commit.then == "end"):
            return
        for pipeline, index in slots:
            if self.context.shards is not None:
                self.context.shards.meet(index)
            stage = self.context.replicas.stages[pipeline, index]
            rows = []
            for layer, module in stage.layers.items():
                state, of_state = marked_hash(stage.optimizers[layer].state_tensors())
                buffers, of_buffers = marked_hash(module.named_buffers())
                rows.append((layer, state, buffers, _short(of_state), _short(of_buffers)))
            for part in in_messages(rows):
                self.context.control.send(messages.AuditMessage(commit.step, pipeline, part))


def _short(marks: Sequence[tuple[str, str]]) -> messages.Marks:
    """Returns the first marks of a layer, as a message takes them: they only explain a difference."""
    return tuple((cut(name, _MOST_OF_NAME, CUT), mark) for name, mark in marks[:_MARKS_PER_ROW])


def _peak_memory_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

"""Training as one worker sees it: step after step, through every epoch.

Rules: an epoch takes the worker out of whatever it waits for. It then says what it holds and is frozen: it takes no
step and no commit until the plan, or a higher epoch. The plan finishes the open step under the ownership that the
verdict left; with the step after it the slots get the shadows that are wanted (heal), and from then on the program is
the usual one. A broken transfer is a suspicion: it is told, and the next epoch says what came of it.

An epoch that was prepared begins with a commit and names the digest of its plan, which everybody has made before. Its
inventories are what the commit leaves: nobody is asked again, and a worker that holds anything else stops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

from engine.core import messages
from engine.core.config.job_wants import is_due
from engine.core.errors import InvariantError, WorkerFailedError
from engine.core.history.run_records import MarkRecord, MovedRecord
from engine.core.ownership import Ownership, Slot
from engine.core.process_messages import ByeMessage
from engine.core.recovery.inventory import to_json
from engine.runtime.ipc.control import Fenced
from engine.runtime.stage.state_hash import marked_hash
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.group_formation import GroupFormation
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.worker_program import WorkerProgram
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.planner_thread import PlannerThread, PreparedPlan
from engine.runtime.worker.validation import Validation
from engine.runtime.worker.worker_context import WorkerContext

_ROWS_PER_MESSAGE, _MARKS_PER_ROW = 10, 100  # so that a message fits into a packet


class Out(Exception):
    """This worker is not a member of the epoch: it has been given up, or may leave."""


class Training:
    """One worker's part in training; `ownership` is that of the open step."""

    def __init__(self, context: WorkerContext, ownership: Ownership, rendezvous: Rendezvous, plane: DataPlane):
        self.context = context
        self.ownership = ownership
        self._rendezvous = rendezvous
        self._plane = plane
        self._forming: GroupFormation | None = None
        self._executor = Executor(context)
        self._planner = PlannerThread(context, ownership.grid)
        self._members: tuple[int, ...] = ownership.workers()
        self._leaving: tuple[int, ...] = ()
        self._program: Literal["usual", "plan", "heal"] = "usual"  # the usual one is what every step has
        self._is_over = False
        self._audited = -1  # the last step that was, or need not be

    def run(self) -> None:
        """Trains to the end of the job, once this worker has said that it is ready; raises Stopped, or Out."""
        self._reconvene()
        while True:
            try:
                while not self._is_over:
                    self._advance()
                self._finish()
                return
            except Fenced:
                self._reconvene()
            except WorkerFailedError as suspicion:
                self._suspect(suspicion)
                self._reconvene()

    def _suspect(self, suspicion: WorkerFailedError) -> None:
        self.context.control.send(messages.SuspicionMessage(self.context.control.accepted, str(suspicion)))

    def _advance(self) -> None:
        """Runs the open step and what follows its commit."""
        commit = self._run_step()
        self._is_over = commit.then == "end"
        self._drop_others()  # what had no part in the step has missed it
        self._audit(commit, self._slots())
        if commit.then == "epoch":
            self._reconvene()  # an epoch follows at once; it says whether this step is to be validated
            return
        if is_due(self.context.job.validate_every, commit.step, self._is_over):
            self._validate(commit.step)
        if self._program != "usual" and not self._is_over:
            self._heal()

    def _run_step(self) -> messages.CommitMessage:
        """Runs the open step; records how much was sent for a recovery, whatever becomes of it."""
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
        context.control.take(ByeMessage)  # when everybody has finished, nobody waits for a transfer any more
        self._plane.close()

    def _reconvene(self) -> None:
        """Enters the newest epoch, and every one that comes meanwhile, until training goes on in one of them."""
        while True:
            epoch = self.context.control.next_epoch()
            try:
                self._enter(epoch)
                return
            except Fenced:
                continue
            except WorkerFailedError as suspicion:
                self._suspect(suspicion)

    def _enter(self, epoch: messages.EpochMessage) -> None:
        context, control = self.context, self.context.control
        control.at = (*control.at[:2], False)
        if context.worker not in epoch.members:
            raise Out
        worker_program: WorkerProgram | None = None
        if epoch.gather:
            worker_program = self._convene(epoch)
        elif epoch.digest is not None:
            worker_program = self._enter_prepared(epoch)
        go = epoch.go or control.take(messages.GoMessage)
        if self._forming is not None:
            self._plane = self._forming.plane()
            self._forming = None
        self._program = "usual" if worker_program is None else "plan"
        self._is_over = go.end
        self._begin(worker_program or self._planner.default_program(self.ownership))
        if go.validate:
            self._validate(self._executor.step - 1)

    def _begin(self, worker_program: WorkerProgram) -> None:
        """Takes a program for what follows. Which one follows on one of a recovery is known from now on."""
        self._executor.enter(self._plane, worker_program)
        if self._program != "usual" and not self._is_over:
            self._planner.plan_next_step(self._executor.step, self.ownership, self._members, self._leaving)

    def _mark(self, phase: messages.OwnPhase, adopted: tuple[Slot, ...] | None = None) -> None:
        self.context.control.mark(phase)
        self.context.recorder.write(MarkRecord(phase=phase, epoch=self.context.control.accepted, adopted=adopted))

    def _regroup(self, epoch: messages.EpochMessage) -> None:
        context = self.context
        if self._forming is not None:
            self._forming.give_up()
        self._plane.close()
        what = (context.worker, epoch.epoch, epoch.members, epoch.store_port)
        self._forming = GroupFormation(context.control, self._rendezvous, context.recorder, *what)

    def _convene(self, epoch: messages.EpochMessage) -> WorkerProgram:
        """Says what this worker holds, and makes the plan of what everybody holds."""
        control = self.context.control
        self._mark("fence")
        inventory = self._executor.inventory()
        whole = self.ownership.grid.places(inventory.whole)
        control.send(messages.InventoryMessage(control.accepted, to_json(inventory), whole))
        self._mark("inventory")
        if epoch.regroup:
            self._regroup(epoch)
        planned = self._planner.plan(control.take(messages.PlanMessage))
        self._catch_up(planned, epoch.commit)
        control.send(messages.PlannedMessage(control.accepted, planned.plan.digest, planned.plan.lost_stages))
        self._take_over(planned, epoch.commit)
        return self._planner.worker_program(planned)

    def _enter_prepared(self, epoch: messages.EpochMessage) -> WorkerProgram:
        """Takes the plan that was made before its epoch began; raises InvariantError when it does not fit."""
        self._mark("fence")
        planned, worker_program = self._planner.take_prepared(epoch)
        self._catch_up(planned, epoch.commit)
        worker, holds = self.context.worker, to_json(self._executor.inventory())
        if (worker, holds) not in planned.told.inventories:
            raise InvariantError(f"worker {worker} holds {holds}, which is not what epoch {epoch.epoch} begins with")
        self._take_over(planned, epoch.commit)
        return worker_program

    def _catch_up(self, planned: PreparedPlan, commit: messages.CommitMessage | None) -> None:
        """Catches up with the last commit, under the ownership of the epoch."""
        self.ownership = planned.ownership
        self._members, self._leaving = planned.told.members, planned.told.leaving
        self._executor.catch_up(commit)
        if commit is not None and commit.step > self._audited:
            whole = self.context.replicas.whole()
            self._audit(commit, [slot for slot in self._slots() if slot in whole])

    def _take_over(self, planned: PreparedPlan, commit: messages.CommitMessage | None) -> None:
        """Takes over what the plan says, unless a stage is lost."""
        plan, replicas = planned.plan, self.context.replicas
        if not plan.lost_stages:
            adopted = [slot for slot in plan.adopted if self.ownership.owner(*slot) == self.context.worker]
            for slot in adopted:
                replicas.adopt(slot)
            if commit is not None:
                self._audit(commit, adopted)
            self._drop_others()
        self._mark("plan", adopted=plan.adopted)

    def _slots(self) -> tuple[Slot, ...]:
        """Returns the slots of which this worker holds a replica in the open step."""
        return (*self.ownership.slots_of(self.context.worker), *self.ownership.shadowed_by(self.context.worker))

    def _drop_others(self) -> None:
        """Drops the replicas that have no part in the open step."""
        replicas = self.context.replicas
        for slot in replicas.stages.keys() - set(self._slots()):
            replicas.drop(slot)

    def _heal(self) -> None:
        """Opens a step with the shadows that are wanted: once more with those who get their replica, then as usual."""
        next_step = self._planner.next_step()
        self.ownership = next_step.ownership
        self._program = "heal" if next_step.is_healing else "usual"
        self._begin(next_step.worker_program)

    def _validate(self, step: int) -> None:
        """Runs a validation pass; so that it can be redone, nobody begins the next step before the outcome is told."""
        control = self.context.control
        with self.context.shards.all_whole() if self.context.shards else contextlib.nullcontext():
            result = Validation(self.context, self._plane, self.ownership).run()
        if result is not None:
            control.send(messages.ValidationMessage(step, result.loss, result.metric))
        control.take(messages.ValidatedMessage)

    def _audit(self, commit: messages.CommitMessage, slots: Sequence[Slot]) -> None:
        """Tells the agent the hash of every layer of these replicas, if the step is one to audit."""
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
                marks = (tuple(of_state[:_MARKS_PER_ROW]), tuple(of_buffers[:_MARKS_PER_ROW]))
                rows.append((layer, state, buffers, *marks))
            for first in range(0, len(rows), _ROWS_PER_MESSAGE):
                part = tuple(rows[first : first + _ROWS_PER_MESSAGE])
                self.context.control.send(messages.AuditMessage(commit.step, pipeline, part))


def _peak_memory_kib() -> int:
    """Returns the most memory that this process has held resident, in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

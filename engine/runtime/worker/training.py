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
from engine.core.process_messages import Bye
from engine.core.recovery.inventory import to_json
from engine.runtime.ipc.control import Fenced
from engine.runtime.stage.state_hash import marked_hash
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.group_formation import Forming
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.worker_program import Share
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.planner_thread import Foresight, Planned
from engine.runtime.worker.surroundings import Surroundings
from engine.runtime.worker.validation import Validation

_ROWS_PER_MESSAGE, _MARKS_PER_ROW = 10, 100  # so that a message fits into a packet


class Out(Exception):
    """This worker is not a member of the epoch: it has been given up, or may leave."""


class Training:
    """One worker's part in training; `ownership` is that of the open step."""

    def __init__(self, around: Surroundings, ownership: Ownership, rendezvous: Rendezvous, plane: DataPlane):
        self.around = around
        self.ownership = ownership
        self._rendezvous = rendezvous
        self._plane = plane
        self._forming: Forming | None = None
        self._executor = Executor(around)
        self._foresight = Foresight(around, ownership.grid)
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
        self.around.control.send(messages.Suspicion(self.around.control.accepted, str(suspicion)))

    def _advance(self) -> None:
        """Runs the open step and what follows its commit."""
        commit = self._run_step()
        self._is_over = commit.then == "end"
        self._drop_others()  # what had no part in the step has missed it
        self._audit(commit, self._slots())
        if commit.then == "epoch":
            self._reconvene()  # an epoch follows at once; it says whether this step is to be validated
            return
        if is_due(self.around.job.validate_every, commit.step, self._is_over):
            self._validate(commit.step)
        if self._program != "usual" and not self._is_over:
            self._heal()

    def _run_step(self) -> messages.Commit:
        """Runs the open step; records how much was sent for a recovery, whatever becomes of it."""
        step, before = self._executor.step, self._plane.bytes_sent
        try:
            return self._executor.run_step()
        finally:
            if self._program != "usual":
                plan = self._program == "plan"
                num_bytes = self._plane.bytes_sent - before if plan else self._executor.end.bytes_healed
                at = {"epoch": self.around.control.accepted, "step": step}
                self.around.recorder.write(MovedRecord(program=self._program, **at, bytes=num_bytes))

    def _finish(self) -> None:
        around = self.around
        slots = self.ownership.slots_of(around.worker)
        peaks = tuple((*slot, around.replicas.stages[slot].peak_stash) for slot in slots)
        around.control.send(messages.Finished(around.control.accepted, peaks, _peak_memory_kib()))
        around.control.take(Bye)  # when everybody has finished, nobody waits for a transfer any more
        self._plane.close()

    def _reconvene(self) -> None:
        """Enters the newest epoch, and every one that comes meanwhile, until training goes on in one of them."""
        while True:
            epoch = self.around.control.next_epoch()
            try:
                self._enter(epoch)
                return
            except Fenced:
                continue
            except WorkerFailedError as suspicion:
                self._suspect(suspicion)

    def _enter(self, epoch: messages.Epoch) -> None:
        around, control = self.around, self.around.control
        control.at = (*control.at[:2], False)
        if around.worker not in epoch.members:
            raise Out
        share: Share | None = None
        if epoch.gather:
            share = self._convene(epoch)
        elif epoch.digest is not None:
            share = self._recall(epoch)
        go = epoch.go or control.take(messages.Go)
        if self._forming is not None:
            self._plane = self._forming.plane()
            self._forming = None
        self._program = "usual" if share is None else "plan"
        self._is_over = go.end
        self._begin(share or self._foresight.usual_share(self.ownership))
        if go.validate:
            self._validate(self._executor.step - 1)

    def _begin(self, share: Share) -> None:
        """Takes a program for what follows. Which one follows on one of a recovery is known from now on."""
        self._executor.enter(self._plane, share)
        if self._program != "usual" and not self._is_over:
            self._foresight.look_past(self._executor.step, self.ownership, self._members, self._leaving)

    def _mark(self, phase: messages.OwnPhase, adopted: tuple[Slot, ...] | None = None) -> None:
        self.around.control.mark(phase)
        self.around.recorder.write(MarkRecord(phase=phase, epoch=self.around.control.accepted, adopted=adopted))

    def _regroup(self, epoch: messages.Epoch) -> None:
        around = self.around
        if self._forming is not None:
            self._forming.give_up()
        self._plane.close()
        what = (around.worker, epoch.epoch, epoch.members, epoch.store_port)
        self._forming = Forming(around.control, self._rendezvous, around.recorder, *what)

    def _convene(self, epoch: messages.Epoch) -> Share:
        """Says what this worker holds, and makes the plan of what everybody holds."""
        control = self.around.control
        self._mark("fence")
        inventory = self._executor.inventory()
        whole = self.ownership.grid.places(inventory.whole)
        control.send(messages.Inventory(control.accepted, to_json(inventory), whole))
        self._mark("inventory")
        if epoch.regroup:
            self._regroup(epoch)
        planned = self._foresight.plan(control.take(messages.Plan))
        self._catch_up(planned, epoch.commit)
        control.send(messages.Planned(control.accepted, planned.plan.digest, planned.plan.lost_stages))
        self._take_over(planned, epoch.commit)
        return self._foresight.share(planned)

    def _recall(self, epoch: messages.Epoch) -> Share:
        """Takes the plan that was made before its epoch began; raises InvariantError when it does not fit."""
        self._mark("fence")
        planned, share = self._foresight.recall(epoch)
        self._catch_up(planned, epoch.commit)
        worker, holds = self.around.worker, to_json(self._executor.inventory())
        if (worker, holds) not in planned.told.inventories:
            raise InvariantError(f"worker {worker} holds {holds}, which is not what epoch {epoch.epoch} begins with")
        self._take_over(planned, epoch.commit)
        return share

    def _catch_up(self, planned: Planned, commit: messages.Commit | None) -> None:
        """Catches up with the last commit, under the ownership of the epoch."""
        self.ownership = planned.ownership
        self._members, self._leaving = planned.told.members, planned.told.leaving
        self._executor.catch_up(commit)
        if commit is not None and commit.step > self._audited:
            whole = self.around.replicas.whole()
            self._audit(commit, [slot for slot in self._slots() if slot in whole])

    def _take_over(self, planned: Planned, commit: messages.Commit | None) -> None:
        """Takes over what the plan says, unless a stage is lost."""
        plan, replicas = planned.plan, self.around.replicas
        if not plan.lost_stages:
            adopted = [slot for slot in plan.adopted if self.ownership.owner(*slot) == self.around.worker]
            for slot in adopted:
                replicas.adopt(slot)
            if commit is not None:
                self._audit(commit, adopted)
            self._drop_others()
        self._mark("plan", adopted=plan.adopted)

    def _slots(self) -> tuple[Slot, ...]:
        """Returns the slots of which this worker holds a replica in the open step."""
        return (*self.ownership.slots_of(self.around.worker), *self.ownership.shadowed_by(self.around.worker))

    def _drop_others(self) -> None:
        """Drops the replicas that have no part in the open step."""
        replicas = self.around.replicas
        for slot in replicas.stages.keys() - set(self._slots()):
            replicas.drop(slot)

    def _heal(self) -> None:
        """Opens a step with the shadows that are wanted: once more with those who get their replica, then as usual."""
        following = self._foresight.following()
        self.ownership = following.ownership
        self._program = "heal" if following.is_healing else "usual"
        self._begin(following.share)

    def _validate(self, step: int) -> None:
        """Runs a validation pass; so that it can be redone, nobody begins the next step before the outcome is told."""
        control = self.around.control
        with self.around.shards.all_whole() if self.around.shards else contextlib.nullcontext():
            result = Validation(self.around, self._plane, self.ownership).run()
        if result is not None:
            control.send(messages.Validation(step, result.loss, result.metric))
        control.take(messages.Validated)

    def _audit(self, commit: messages.Commit, slots: Sequence[Slot]) -> None:
        """Tells the agent the hash of every layer of these replicas, if the step is one to audit."""
        self._audited = commit.step
        if not is_due(self.around.job.audit, commit.step, commit.then == "end"):
            return
        for pipeline, index in slots:
            if self.around.shards is not None:
                self.around.shards.meet(index)
            stage = self.around.replicas.stages[pipeline, index]
            rows = []
            for layer, module in stage.layers.items():
                state, of_state = marked_hash(stage.optimizers[layer].state_tensors())
                buffers, of_buffers = marked_hash(module.named_buffers())
                marks = (tuple(of_state[:_MARKS_PER_ROW]), tuple(of_buffers[:_MARKS_PER_ROW]))
                rows.append((layer, state, buffers, *marks))
            for first in range(0, len(rows), _ROWS_PER_MESSAGE):
                part = tuple(rows[first : first + _ROWS_PER_MESSAGE])
                self.around.control.send(messages.Audit(commit.step, pipeline, part))


def _peak_memory_kib() -> int:
    """Returns the most memory that this process has held resident, in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

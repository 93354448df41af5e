"""A simulated worker: it handles messages as the runtime's worker does, with hashes instead of tensors.

Rules: after its inventory a worker changes nothing until the plan; a plan is of the worker's own epoch; a fence comes
before or after the step of all replicas of a worker. Each rule has its own method, so a test can remove it.
"""

from __future__ import annotations

from engine.core.ownership import Slot
from tests.simulation.actions import take_arrived
from tests.simulation.case import Violation
from tests.simulation.compiled import Compiled
from tests.simulation.plans import Document, Planned, next_program, planned, read
from tests.simulation.process import BOUNDARY, DONE, FROZEN, PLANNED, RUNNING, Process
from tests.simulation.replica import adopted, inventory_of


class Worker(Process):
    """One worker, with a method for each message."""

    def on_epoch(self, epoch: int, members: tuple[int, ...]) -> None:
        """Leaves the old epoch, freezes, and sends its inventory."""
        if epoch <= self.epoch:
            return
        if self.number not in members:
            self.world.end(self, 85)
            return
        take_arrived(self)
        self.epoch, self.mode, self.members = epoch, FROZEN, members
        self.inbox, self.ahead, self.broken = {}, {}, set()
        if not self.come_to("fence"):
            if self.alive:
                self.overdue.append((self.tell_inventory, (epoch,)))
            return
        self.tell_inventory(epoch)

    def tell_inventory(self, epoch: int) -> None:
        """Sends its inventory."""
        self.come_to("inventory")
        if self.alive:
            self.holds = self.inventory()
            self.world.judge.inventoried(self, self.holds)
            whole = self.ownership.grid.places(read(self.holds).whole)
            self.world.say("inventory", epoch, self.number, self.holds, whole)
            self.come_to("inventoried")

    def inventory(self) -> str:
        """Returns its inventory as text."""
        return inventory_of(self)

    def on_plan(self, document: Document) -> None:
        """Makes the plan, which takes a while."""
        if document.epoch != self.epoch:
            self.world.turns.add("plan comes too late")
        if self.fits(document.epoch) and self.mode == FROZEN:
            self.come_to("plan")
            self.busy = True
            self.world.push(self.world.planning(), self.make_plan, document)

    def fits(self, epoch: int) -> bool:
        """Whether a message of the control plane is of this epoch."""
        return epoch == self.epoch

    def make_plan(self, document: Document) -> None:
        """Catches up, adopts, and makes and reports the plan."""
        if self.puts_off(self.make_plan, document):
            return
        self.busy = False
        if document.epoch != self.epoch:
            raise Violation(f"worker {self.number} makes a plan of epoch {document.epoch} in epoch {self.epoch}")
        if self.inventory() != self.holds:
            raise Violation(f"worker {self.number} has changed after its inventory")
        self.catch_up(document)
        made = self.plan_of(document)
        self.leaving = document.leaving
        self.mode, self.document = PLANNED, document
        if not made.plan.lost_stages:
            adopted(self, made.plan.adopted, document.ownership)
            self.ownership = document.ownership
            self.share = made.shares.get(self.number, Compiled((), ()))
        self.world.say("planned", document.epoch, self.number, made.plan.digest, made.plan.lost_stages)
        self.come_to("planned")
        self.wake()

    def plan_of(self, document: Document) -> Planned:
        """Returns the plan of a document."""
        return planned(document)

    def catch_up(self, document: Document) -> None:
        """Applies the committed step if the commit has not reached this worker."""
        if document.committed == self.step:
            self.world.turns.add("worker catches up")
            self.take_step(document.clip)
        elif document.committed != self.step - 1:
            raise Violation(f"worker {self.number} is in step {self.step}, the commit is of step {document.committed}")

    def on_go(self, epoch: int) -> None:
        """Runs the plan."""
        if not self.fits(epoch) or self.mode != PLANNED:
            return
        assert self.document is not None and self.share is not None
        self.enter(self.document.ownership, self.share)
        self.mode = RUNNING
        self.come_to("go")

    def on_commit(self, epoch: int, step: int, clip: float, then: str) -> None:
        """Takes the step and goes on with `then`; a frozen worker, or one in another epoch, accepts no commit."""
        if not self.obeys_commit(epoch):
            self.world.turns.add("commit comes too late")
            return
        if self.mode == FROZEN:
            raise Violation(f"worker {self.number} takes a commit after its inventory")
        if step == self.step:
            if self.mode == RUNNING and self.cursor < len(self.actions):
                raise Violation(f"step {step} is committed before worker {self.number} has voted")
            self.come_to("commit")
            if not self.alive:
                return
            self.take_step(clip)
            self.come_to("stepped")
            if then == "step":
                self.open_step()
        elif step > self.step:
            raise Violation(f"worker {self.number} in step {self.step} is told of the commit of step {step}")
        if then == "end" and self.mode != DONE:
            self.mode = DONE
            self.world.say("done", epoch, self.number)
        elif then == "epoch":
            self.mode = BOUNDARY

    def obeys_commit(self, epoch: int) -> bool:
        """Whether it accepts commits: not after an inventory or a suspicion."""
        return self.fits(epoch) and self.mode in (RUNNING, PLANNED, DONE)

    def open_step(self) -> None:
        """Begins the next step with what heals."""
        case = self.case
        ownership, shares = next_program(
            *(case.schedule, self.ownership, case.redundancy, case.level, case.log_every, self.members, self.leaving)
        )
        self.enter(ownership, shares.get(self.number, Compiled((), ())))

    def take_step(self, clip: float) -> None:
        """Applies the optimizer step to every replica and drops the step's values; a fence cannot interrupt it."""
        for slot in self.steps_now():
            replica = self.replicas[slot]
            replica.take_step(clip)
            self.world.judge.stepped(self, replica)
        self.step += 1
        self.values, self.made, self.reduced = {}, set(), {}
        self.inbox, self.ahead = self.ahead, {}

    def steps_now(self) -> tuple[Slot, ...]:
        """Returns the replicas that take the step."""
        if set(self.steps) != set(self.replicas):
            raise Violation(f"worker {self.number} steps {self.steps} and holds {sorted(self.replicas)}")
        return self.steps

    def on_end(self) -> None:
        """Ends the process."""
        self.world.end(self, 0)

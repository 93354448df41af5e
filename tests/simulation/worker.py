"""A simulated worker: it obeys as the runtime's does, with hashes instead of tensors.

Rules: an action is atomic to the fence; an inventory freezes; what comes from a lower epoch is dropped, what comes early
is kept; an update in place applies only where its counter fits. Each rule is a method of its own, so that a test can
take it out and see that the simulation notices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.core.ownership import Ownership, Slot
from tests.simulation.actions import perform
from tests.simulation.case import Violation
from tests.simulation.compiled import COMPUTE, POINT_OF, Compiled
from tests.simulation.plans import Document, Planned, next_program, planned
from tests.simulation.replica import Replica, adopted, inventory_of

if TYPE_CHECKING:
    from tests.simulation.world import World

FENCED, FROZEN, PLANNED, RUNNING, SUSPECTING, BOUNDARY, DONE = range(7)


class Worker:
    """One process. `moments` counts all that it comes to; while it is `watched`, the world looks at each of them."""

    def __init__(self, world: World, number: int):
        self.world = world
        self.number = number
        self.case = world.case
        self.retains = world.retains
        self.alive = True
        self.paused = False
        self.watched = False
        self.trap = 0  # the next of its moments at which something happens to it
        self.moments = 0
        self.epoch = 1
        self.mode = RUNNING
        self.step = 0
        self.replicas: dict[Slot, Replica] = {}
        self.values: dict[int, int] = {}
        self.made: set[int] = set()
        self.reduced: dict[int, Any] = {}
        self.queue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.inbox: dict[int, tuple[int, int, Any]] = {}
        self.ahead: dict[int, tuple[int, int, Any]] = {}  # of the step after
        self.early: list[tuple[int, int, int, int, Any]] = []  # of a later epoch
        self.broken: set[int] = set()
        self.overdue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.busy = False
        self.leaving: tuple[int, ...] = ()
        self.members = world.members
        self.holds = ""
        self.document: Document | None = None
        self.share: Compiled | None = None

    # What it runs

    def enter(self, ownership: Ownership, share: Compiled) -> None:
        """Takes its share of a program."""
        self.ownership = ownership
        self.actions, self.steps = share
        self.cursor, self.begun, self.parted = 0, -1, -1
        self.reduced = {}
        for slot in [each for each in self.replicas if self.number not in ownership.replicas(*each)]:
            del self.replicas[slot]

    def come_to(self, point: str) -> bool:
        """Counts a moment; returns whether the worker is there still after it."""
        self.moments += 1
        if self.watched or self.moments == self.trap:
            self.world.strike(self, point)
            return self.alive and not self.paused
        return True

    def wake(self) -> None:
        """Does what there is to do, until it must wait or an action takes its time."""
        while self.alive and not self.busy and not self.paused:
            if self.queue:
                self.attend()
                continue
            if self.mode != RUNNING or self.cursor == len(self.actions):
                return
            action = self.actions[self.cursor]
            code = action[0]
            if self.begun != self.cursor:
                self.begun = self.cursor
                if not self.come_to(POINT_OF[code]):
                    return
            if code <= COMPUTE:
                self.busy = True
                self.world.push(self.world.cost(code), self.finish, action)
                return
            if not perform(self, action):
                return
            self.world.note(self.number, code, self.cursor)
            self.cursor += 1
            self.come_to("")

    def finish(self, action: tuple[Any, ...]) -> None:
        """An action that takes its time has come to its end."""
        if self.puts_off(self.finish, action):
            return
        self.busy = False
        perform(self, action)
        self.world.judge.computed(self, action)
        self.world.note(self.number, action[0], self.cursor)
        self.cursor += 1
        if self.come_to(""):
            self.wake()

    def puts_off(self, what: Callable[..., None], *words: Any) -> bool:
        """Returns whether it is dead, or stopped, and does this when it wakes."""
        if self.alive and self.paused:
            self.overdue.append((what, words))
        return not self.alive or self.paused

    def resume(self) -> None:
        """It is no longer stopped, and does all that has come up meanwhile."""
        if not self.alive:
            return
        self.paused = False
        overdue, self.overdue = self.overdue, []
        for what, words in overdue:
            what(*words)
        self.wake()

    # What it receives

    def receive(self, epoch: int, step: int, source: int, key: int, payload: Any) -> None:
        """A transfer has arrived."""
        if self.puts_off(self.receive, epoch, step, source, key, payload):
            return
        if epoch > self.epoch:
            self.early.append((epoch, step, source, key, payload))
        elif self.accepts(epoch):
            box = self.inbox if step == self.step else self.ahead
            box[key] = (epoch, source, payload)
            self.wake()

    def accepts(self, epoch: int) -> bool:
        """Nothing of a lower epoch is accepted."""
        return epoch == self.epoch

    def take(self, key: int, source: int) -> Any:
        """Returns what has come, or None: then it waits, or the link is broken."""
        found = self.inbox.pop(key, None)
        if found is None:
            if source in self.broken:
                self.suspect(source)
            return None
        epoch, sender, payload = found
        if epoch != self.epoch:
            raise Violation(f"worker {self.number} in epoch {self.epoch} took what epoch {epoch} had sent")
        if sender != source:
            raise Violation(f"worker {self.number} took from worker {sender} what it expected from worker {source}")
        return payload

    def lose_link(self, epoch: int, peer: int) -> None:
        """The connection to a peer has broken."""
        if self.puts_off(self.lose_link, epoch, peer):
            return
        if epoch == self.epoch:
            self.broken.add(peer)
            self.wake()

    def suspect(self, peer: int | None) -> None:
        """A transfer failed: it waits for a verdict, and accepts nothing in this epoch."""
        if self.mode == RUNNING:
            self.mode = SUSPECTING
            self.world.say("suspicion", self.epoch, self.number, peer)

    # What it is told

    def told(self, what: str, *words: Any) -> None:
        """A message of the control plane is there; the main thread takes it when it is free."""
        self.queue.append((getattr(self, f"on_{what}"), words))
        if not self.busy and not self.paused and self.alive:
            lag = self.world.lag()
            if lag:
                self.world.push(lag, self.wake)
            else:
                self.wake()

    def attend(self) -> None:
        """Takes the next message; an epoch goes before all others."""
        place = next((at for at, (what, _) in enumerate(self.queue) if what.__name__ == "on_epoch"), 0)
        what, words = self.queue.pop(place)
        what(*words)

    def on_epoch(self, epoch: int, members: tuple[int, ...]) -> None:
        """Leaves the old epoch for good, freezes, and says what it holds."""
        if epoch <= self.epoch:
            return
        if self.number not in members:
            self.world.end(self, 85)
            return
        self.epoch, self.mode, self.members = epoch, FROZEN, members
        self.inbox, self.ahead, self.broken = {}, {}, set()
        early, self.early = self.early, []
        if not self.come_to("fence"):
            if self.alive:
                self.overdue.append((self.tell_inventory, (epoch, early)))
            return
        self.tell_inventory(epoch, early)

    def tell_inventory(self, epoch: int, early: list[tuple[int, int, int, int, Any]]) -> None:
        """Says what it holds."""
        for each in early:
            self.receive(*each)
        self.come_to("inventory")
        if self.alive:
            self.holds = self.inventory()
            self.world.judge.inventoried(self, self.holds)
            self.world.say("inventory", epoch, self.number, self.holds)
            self.come_to("inventoried")

    def inventory(self) -> str:
        """Returns what it holds, as text."""
        return inventory_of(self)

    def on_plan(self, document: Document) -> None:
        """Makes the plan, which takes a while."""
        if self.fits(document.epoch) and self.mode == FROZEN:
            self.come_to("plan")
            self.busy = True
            self.world.push(self.world.planning(), self.make_plan, document)

    def fits(self, epoch: int) -> bool:
        """Returns whether words of the control plane are of this epoch."""
        return epoch == self.epoch

    def make_plan(self, document: Document) -> None:
        """Catches up, adopts, and says what plan it has made."""
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
        """Applies the committed step if this worker has not heard of the commit."""
        if document.committed == self.step:
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
        """Steps, and goes on as it is told; frozen, or in another epoch, it accepts no commit."""
        if not self.obeys_commit(epoch):
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
        """An inventory freezes, and so does a suspicion."""
        return self.fits(epoch) and self.mode in (RUNNING, PLANNED, DONE)

    def open_step(self) -> None:
        """Begins the next step with what heals."""
        case = self.case
        ownership, shares = next_program(
            case.schedule, self.ownership, case.redundancy, case.level, self.members, self.leaving
        )
        self.enter(ownership, shares.get(self.number, Compiled((), ())))

    def take_step(self, clip: float) -> None:
        """Applies the optimizer step to every replica, and drops what was of the step; one action to the fence."""
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
        """Lets go."""
        self.world.end(self, 0)

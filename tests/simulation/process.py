"""A simulated process: its main thread runs actions and waits, others hand it transfers and messages.

Rules: an action is atomic to the fence; what comes from a lower epoch is dropped, and nothing comes from a higher one,
because nobody is sent to work before all have come. Whoever is stopped does nothing until it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.core.ownership import Ownership, Slot
from tests.simulation.actions import perform
from tests.simulation.case import Violation
from tests.simulation.compiled import COMPUTE, POINT_OF, Compiled
from tests.simulation.replica import Replica

if TYPE_CHECKING:
    from tests.simulation.plans import Document
    from tests.simulation.world import World

FENCED, FROZEN, PLANNED, RUNNING, SUSPECTING, BOUNDARY, DONE = range(7)


class Process:
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
        self.values: dict[int, Any] = {}
        self.made: set[int] = set()
        self.reduced: dict[int, Any] = {}
        self.queue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.inbox: dict[int, tuple[int, int, Any]] = {}
        self.ahead: dict[int, tuple[int, int, Any]] = {}  # of the step after
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
            raise Violation(f"worker {self.number} is in epoch {self.epoch}, and worker {source} sends in {epoch}")
        if self.accepts(epoch):
            box = self.inbox if step == self.step else self.ahead
            box[key] = (epoch, source, payload)
            self.wake()
        else:
            self.world.turns.add("transfer of an old epoch is dropped")

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
            self.world.turns.add("transfer fails")
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

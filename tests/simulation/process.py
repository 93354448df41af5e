"""A simulated process: its main thread runs actions and waits; other threads bring transfers and messages.

Rules: a fence does not interrupt an action. Transfers of a lower epoch are dropped. Transfers of a higher epoch do not
occur, because no worker trains before all members have joined. A stopped process does nothing until it resumes.
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
    """One process. `moments` counts its moments; while it is `watched`, the world checks each of them."""

    def __init__(self, world: World, number: int):
        self.world = world
        self.number = number
        self.case = world.case
        self.retains = world.retains
        self.alive = True
        self.paused = False
        self.watched = False
        self.trap = 0  # its next moment with a fault
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
        self.ahead: dict[int, tuple[int, int, Any]] = {}  # transfers of the next step
        self.broken: set[int] = set()
        self.overdue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.busy = False
        self.leaving: tuple[int, ...] = ()
        self.members = world.members
        self.holds = ""
        self.document: Document | None = None
        self.share: Compiled | None = None

    # Actions

    def enter(self, ownership: Ownership, share: Compiled) -> None:
        """Begins its share of a program."""
        self.ownership = ownership
        self.actions, self.steps = share
        self.cursor, self.begun, self.parted = 0, -1, -1
        self.reduced = {}
        for slot in [each for each in self.replicas if self.number not in ownership.replicas(*each)]:
            del self.replicas[slot]

    def come_to(self, point: str) -> bool:
        """Counts a moment; returns whether the worker still lives after it."""
        self.moments += 1
        if self.watched or self.moments == self.trap:
            self.world.strike(self, point)
            return self.alive and not self.paused
        return True

    def wake(self) -> None:
        """Runs until it must wait, or an action takes time."""
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
        """Ends an action that takes time."""
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
        """Returns whether it is dead or stopped; a stopped process makes the call when it wakes."""
        if self.alive and self.paused:
            self.overdue.append((what, words))
        return not self.alive or self.paused

    def resume(self) -> None:
        """Ends a stop, and makes all calls that came meanwhile."""
        if not self.alive:
            return
        self.paused = False
        overdue, self.overdue = self.overdue, []
        for what, words in overdue:
            what(*words)
        self.wake()

    # Transfers

    def receive(self, epoch: int, step: int, source: int, key: int, payload: Any) -> None:
        """Takes a transfer that has arrived."""
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
        """Whether transfers of an epoch are accepted; of a lower one they are not."""
        return epoch == self.epoch

    def take(self, key: int, source: int) -> Any:
        """Returns a transferred value; None if it must wait, or the link is broken."""
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
        """Handles a broken connection to a peer."""
        if self.puts_off(self.lose_link, epoch, peer):
            return
        if epoch == self.epoch:
            self.broken.add(peer)
            self.wake()

    def suspect(self, peer: int | None) -> None:
        """Reports a failed transfer, waits for a verdict, and accepts nothing more in this epoch."""
        if self.mode == RUNNING:
            self.mode = SUSPECTING
            self.world.turns.add("transfer fails")
            self.world.say("suspicion", self.epoch, self.number, peer)

    # Messages of the control plane

    def told(self, what: str, *words: Any) -> None:
        """Queues a message of the control plane; the main thread takes it when it is free."""
        self.queue.append((getattr(self, f"on_{what}"), words))
        if not self.busy and not self.paused and self.alive:
            lag = self.world.lag()
            if lag:
                self.world.push(lag, self.wake)
            else:
                self.wake()

    def attend(self) -> None:
        """Takes the next message; an epoch has priority."""
        place = next((at for at, (what, _) in enumerate(self.queue) if what.__name__ == "on_epoch"), 0)
        what, words = self.queue.pop(place)
        what(*words)

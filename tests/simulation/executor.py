"""The stand-in of a worker's tensors and transfers: runs programs with hashes in place of tensors, in virtual time.

Rules: nothing interrupts an action. A group takes the transfers of its own number only. A transfer of a later group is
an error, because a group is formed when all members have joined it. A stopped process does nothing until it resumes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.core.ownership import Ownership, Slot
from engine.core.program.ballot import SlotVote
from tests.simulation.actions import inputs_of, perform
from tests.simulation.case import Violation
from tests.simulation.compiled import (
    CARRIED,
    COMPUTE,
    OFFLOAD,
    OPS,
    PENDING,
    POINT_OF,
    RECEIVE,
    RELOAD,
    RESIDUAL,
    TAKE_LOG,
    Compiled,
    parts_of,
    with_copies,
)
from tests.simulation.replica import Replica

if TYPE_CHECKING:
    from tests.simulation.world import World

_NO_PROGRAM = Compiled((), ())
_POSTED_AHEAD = 4


class Executor:
    """One process. `moments` counts its moments; while it is `watched`, the world checks each of them."""

    ownership: Ownership

    def __init__(self, world: World, number: int):
        self.world = world
        self.number = number
        self.case = world.case
        self.retains = world.retains
        self.alive = True
        self.paused = False
        self.busy = False  # inside an action, or a computation of the main thread
        self.has_news = False  # for the main thread
        self.overdue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.watched = False
        self.trap = 0  # its next moment with a fault
        self.moments = 0
        self.step = 0
        self.replicas: dict[Slot, Replica] = {}
        self.values: dict[int, Any] = {}
        self.lasting: set[int] = set()  # values that stay until the commit
        self.away: set[int] = set()  # residuals on the host
        self.votes: list[SlotVote] = []
        self.reduced: dict[int, Any] = {}
        self.runs = False  # inside a program
        self.actions, self.steps, _ = _NO_PROGRAM
        self.cursor = self.begun = self.parted = 0
        self.is_formed = False  # the group
        self.group = -1  # the number of the newest group that it has entered
        self.next_groups: dict[int, set[int]] = {}  # formed for coming epochs: the peers with a broken link in each
        self.early_transfers: list[tuple[int, int, int, int, Any]] = []  # in a group that it has not entered yet
        self.inbox: dict[int, tuple[int, int, int, Any]] = {}
        self.ahead: dict[int, tuple[int, int, int, Any]] = {}  # transfers of the next step
        self.broken: set[int] = set()
        self.whole: set[int] = set()  # the stages in shards that are put together here
        self.lost: set[int] = set()  # peers that did not get what it sent
        self.sent: dict[int, int] = defaultdict(int)  # transfers in this group, by peer
        self.taken: dict[int, int] = defaultdict(int)
        self.woken_ns = 0  # by its last piece of news

    # What a worker adds

    @property
    def epoch(self) -> int:
        """The epoch that it has entered."""
        raise NotImplementedError

    def attends(self) -> bool:
        """Handles what comes to the main thread while it waits or between two actions; returns if there may be more."""
        raise NotImplementedError

    def program_ended(self) -> None:
        """Handles the end of the program."""
        raise NotImplementedError

    def transfer_failed(self, peer: int | None) -> None:
        """Handles a broken link to a peer that the program waits for."""
        raise NotImplementedError

    # Actions

    def enter(self, share: Compiled) -> None:
        """Begins its share of a program."""
        self.actions, self.steps, _ = share
        self.whole = set()
        if self.case.copy_time and not any(code in (OFFLOAD, RELOAD) for code, *_ in share.actions):
            here = {key for key in self.values if parts_of(key)[0] in (RESIDUAL, PENDING)} - self.away
            self.actions = with_copies(share, self.ownership, self.case.copy_time, here, self.away)

    def begin_program(self) -> None:
        """Runs its program from the beginning."""
        if not self.is_formed:
            raise Violation(f"worker {self.number} runs before its group is formed")
        self.cursor, self.begun, self.parted = 0, -1, -1
        self.reduced, self.votes = {}, []
        self.runs = True

    def come_to(self, point: str) -> bool:
        """Counts a moment; returns whether the worker still lives after it."""
        self.moments += 1
        if self.watched or self.moments == self.trap:
            return self._strike(point)
        return True

    def wake(self) -> None:
        """Runs until it must wait, or an action takes time."""
        self.woken_ns = self.world.now
        while self.alive and not self.busy and not self.paused:
            if self.has_news:
                self.has_news = self.attends()
                continue
            if not self.runs:
                return
            cursor = self.cursor
            if cursor == len(self.actions):
                self.runs = False
                self.program_ended()
                continue
            action = self.actions[cursor]
            code = action[0]
            if self.begun != cursor:
                self.begun = cursor
                self.moments += 1
                if (self.watched or self.moments == self.trap) and not self._strike(POINT_OF[code]):
                    return
            if code <= COMPUTE:
                self.busy = True
                self.world.push(self.world.cost(code), self.finish, action)
                return
            if perform(self, action):
                self._done(code)
            elif self.runs:
                return

    def finish(self, action: tuple[Any, ...]) -> None:
        """Ends an action that takes time."""
        if self.puts_off(self.finish, action):
            return
        self.busy = False
        perform(self, action)
        self.world.judge.computed(self, action)
        self._done(action[0])
        self.wake()

    def _done(self, code: int) -> None:
        if self.world.tell_all:
            self.world.show(self.number, code, self.cursor)
        if code in OPS:
            self.world.judge.samples.did(self, self.actions[self.cursor])
        self.cursor += 1
        self.moments += 1
        if self.watched or self.moments == self.trap:
            self._strike("")

    def _strike(self, point: str) -> bool:
        self.world.strike(self, point)
        return self.alive and not self.paused

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

    def join(self, group: int) -> None:
        """Leaves its group for a new one."""
        self.group, self.is_formed = group, False
        self.inbox, self.ahead, self.broken, self.lost = {}, {}, set(), set()
        self.sent, self.taken = defaultdict(int), defaultdict(int)

    def enter_next(self, group: int) -> None:
        """Leaves its group for one that was formed meanwhile; some members may have entered it before."""
        self.world.links.break_all(self, (self.group,))
        broken = self.next_groups.pop(group)
        self.join(group)
        self.is_formed, self.broken = True, broken
        early, self.early_transfers = self.early_transfers, []
        for transfer in early:
            self.world.push(0, self.receive, *transfer)  # not at once: the main thread has not ended its entry

    def forms(self, group: int) -> bool:
        """Whether it forms a group."""
        raise NotImplementedError

    def receive(self, group: int, step: int, source: int, key: int, payload: Any) -> None:
        """Takes a transfer that has arrived."""
        if self.puts_off(self.receive, group, step, source, key, payload):
            return
        if group in self.next_groups:
            self.early_transfers.append((group, step, source, key, payload))
            return
        if group > self.group:
            raise Violation(f"worker {self.number} is in group {self.group}, and worker {source} sends in {group}")
        if self.accepts(group):
            if step >= self.step:
                box = self.inbox if step == self.step else self.ahead
                box[self.slot_of(key)] = (group, source, key, payload)
            self.wake()
        else:
            self.world.turns.add("transfer of an old group is dropped")

    def slot_of(self, key: int) -> int:
        """Returns the receive that a message is matched with: that of its own key."""
        return key

    def accepts(self, group: int) -> bool:
        """Whether transfers of a group are accepted; of an earlier one they are not."""
        return group == self.group

    def take(self, key: int, source: int) -> Any:
        """Returns a transferred value; None if it must wait, or the link is broken."""
        found = self.inbox.pop(key, None)
        if found is None:
            if source in self.broken:
                self.transfer_failed(source)
            return None
        group, sender, sent, payload = found
        if sent != key:
            raise Violation(f"worker {self.number} took {parts_of(sent)} for {parts_of(key)}")
        if group != self.group:
            raise Violation(f"worker {self.number} in group {self.group} took what group {group} had sent")
        if sender != source:
            raise Violation(f"worker {self.number} took from worker {sender} what it expected from worker {source}")
        if self.world.links.counts:
            self.taken[source] += 1
        return payload

    def awaited(self) -> dict[int, int]:
        """Returns the transfers that it has asked for and not taken, each with its source."""
        found: dict[int, int] = {}
        streams = set()
        ahead = _POSTED_AHEAD
        for place, action in enumerate(self.actions[self.cursor :] if self.runs else ()):
            code = action[0]
            if code == RECEIVE and ahead:
                ahead -= 1
                found[action[1]] = action[2]
            elif code in CARRIED and action[1] not in streams:
                streams.add(action[1])
                found[action[3]] = action[4]
            elif code == TAKE_LOG and self.actions[self.cursor][0] == TAKE_LOG:
                found[action[2]] = action[3]
            elif place == 0:
                found |= inputs_of(action, self.number)
        return found

    def lose_link(self, group: int, peer: int) -> None:
        """Handles a broken connection to a peer."""
        if self.puts_off(self.lose_link, group, peer):
            return
        if group in self.next_groups:
            self.next_groups[group].add(peer)
        elif group == self.group:
            self.broken.add(peer)
            self.wake()

    # Steps

    def take_step(self, clip: float, slots: Sequence[Slot]) -> None:
        """Applies the optimizer step to these replicas, and drops the others and the step's values."""
        for slot in slots:
            replica = self.replicas[slot]
            replica.take_step(clip)
            self.world.judge.stepped(self, replica)
        self.step += 1
        self.replicas = {slot: replica for slot, replica in self.replicas.items() if replica.version == self.step}
        self.values, self.lasting, self.away, self.reduced = {}, set(), set(), {}
        self.inbox, self.ahead = self.ahead, {}

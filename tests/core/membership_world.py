"""A simulated world for the membership protocol: workers, a bus and a coordinator, driven by one seed.

The workers follow orders like real ones. The bus reorders, repeats and delays messages to the coordinator. Orders may
be lost, repeated or late, and the coordinator may be replaced at any moment. The world knows every fault that it has
injected, and therefore the decisions that the protocol must never take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from engine.core.exclusion import Cause
from engine.core.membership import effects, events
from engine.core.membership.effects import Effect
from engine.core.membership.protocol import step
from engine.core.membership.state import GATHERING, Options, Phase, State, begin, resume, to_json
from engine.core.messages import PlanMessage

ROUND = 10  # time between two rounds of heartbeats
FENCED, FROZEN, PLANNED, TRAINING, DONE = range(5)  # the state of a worker in its epoch; it only increases
EVICTED_AFTER = 2  # repeats
_ONCE = (effects.PublishEpoch, effects.GatherInventories, effects.PublishPlanInput)  # one of a kind in an epoch
_CODES = {event: code for code, event in enumerate(events.EVENTS)}
_ANSWERS = (events.Suspicion, events.InventoryReceived, events.PlanAcknowledged, events.Done)
_TIMES = {"form": 300, "hail": 300, "answer": 60, "stall": 120, "silence": 50, "hang": 80, "look": 15, "repeat": 10}


class Violation(Exception):
    """The protocol broke a promise."""


class Worker:
    """A worker process: the orders it has received, its state, and the faults injected into it."""

    __slots__ = ("alive", "committed", "epoch", "inbox", "joined", "mode", "number", "spins", "stopped")

    def __init__(self, number: int):
        self.number = number
        self.inbox: list[tuple[Effect, ...]] = []
        self.epoch = 0
        self.mode = FENCED
        self.committed = -1
        self.joined = False
        self.alive = True
        self.stopped = False  # does not run and sends nothing
        self.spins = False  # does not run, but sends heartbeats


@cache
def _options(stages: int, redundant: bool, restarts: int) -> Options:
    times = {f"{name}_ns": time for name, time in _TIMES.items()}
    most = {"max_repeats": EVICTED_AFTER, "max_restarts": restarts}
    return Options(stages=stages, redundant=redundant, hang_factor=2, **most, **times)


class World:
    """One job of `Random(seed)` and its coordinator."""

    def __init__(self, rng: Random, tell: Callable[[str], None] | None = None):
        self.pick = rng.random
        self.tell = tell
        count = 2 + int(self.pick() * 3)
        self.redundant = self.pick() < 0.85
        self.workers = [Worker(number) for number in range(count)]
        level = 1 + (count > 2 and self.pick() < 0.3) if self.redundant else 0
        shadows = tuple(tuple((slot - 1 - k) % count for k in range(level)) for slot in range(count))
        self.stages = 2 if count == 4 and self.pick() < 0.5 else count  # of one pipeline
        self.now = 0
        options = _options(self.stages, self.redundant, restarts=count % 2)
        self.state = begin(options, tuple(range(count)), shadows, int(self.pick() * 3), 0)
        self.starts = 0
        self.bus: list[tuple[type, tuple[Any, ...]]] = []
        self.echoes: list[tuple[type, tuple[Any, ...]]] = []
        self.late: list[tuple[Effect, ...]] = []
        self.calm = False
        self.trace = 0
        self.votes: dict[tuple[int, int], int] = {}
        self.broken: tuple[int, int] | None = None  # these two cannot talk
        # The truth, which the protocol does not know.
        self.struck: set[int] = set()
        self.noticed: set[int] = set()
        self.complaints: list[set[int]] = [set() for _ in self.workers]  # the epochs in which a transfer failed at each
        self.holders = [{slot, *line} for slot, line in enumerate(shadows)]
        self.copies: list[set[int]] = [set() for _ in self.workers]  # slots whose new replica came in the open step
        self.owners: dict[int, tuple[int, ...]] = {}  # of each epoch, as its workers know them
        self.published: dict[tuple[type, int], Effect] = {}
        self.arrows: set[tuple[Phase, type, Phase]] = set()
        for worker in self.workers:
            if self.pick() < 0.95:
                self.join(worker)

    # The coordinator

    def say(self, kind: type, *words: Any) -> None:
        """Sends an event to the coordinator; it arrives at a later, random time."""
        self.bus.append((kind, words))

    def join(self, worker: Worker) -> None:
        """A worker is ready; two share a node."""
        worker.joined = True
        self.say(events.Joined, worker.number, f"node-{worker.number // 2}")

    def deliver(self, kind: type, words: tuple[Any, ...]) -> None:
        """One event arrives, and perhaps once more at any later time."""
        old = self.state
        if self.pick() < 0.06 and kind is not events.Restarted:  # it comes from the coordinator itself
            self.echoes.append((kind, words))
        new, found = step(old, kind(self.now, *words))
        self.trace = (self.trace * 1000003 + _CODES[kind] * 8191 + new.epoch * 131 + len(found)) & 0xFFFFFFFFFFFF
        if self.tell:
            told = ", ".join(type(effect).__name__ for effect in found)
            self.tell(f"{self.now:5} {kind.__name__} {words}: {new.phase} in epoch {new.epoch} {told}")
        if new is not old:
            self.state = new
            self.check_words(old, kind, words)
            if new.epoch != old.epoch:
                self.check_epoch(old)
            if new.phase is not old.phase:
                self.arrows.add((old.phase, kind, new.phase))
                self.check_phase(old)
        is_settled = self.has_ended() or new.phase is Phase.RESTARTING
        if kind is events.ExitSeen and words[0] in new.members and words[0] not in new.exited and not is_settled:
            raise Violation(f"worker {words[0]} has ended and stays a member")
        if found:
            self.emit(found)

    def emit(self, found: tuple[Effect, ...]) -> None:
        """Sends effects to all workers: usually once, sometimes twice, late, or not at all."""
        for effect in found:
            kind = type(effect)
            if isinstance(effect, effects.PublishPlanInput) and effect.epoch not in self.owners:
                self.check_owners(effect.document)
            if kind in _ONCE and self.published.setdefault((kind, effect.epoch), effect) != effect:
                raise Violation(f"two different {kind.__name__} in epoch {effect.epoch}")
        chance = 1.0 if self.calm else self.pick()
        if chance < 0.06:
            return  # the coordinator ended before it could tell
        if isinstance(found[0], effects.OrderRestart):
            if self.state.phase is Phase.RESTARTING:
                self.restart()
            return
        if chance < 0.12:
            self.late.append(found)
            return
        for worker in self.workers:
            if worker.alive:
                worker.inbox.append(found)
                if chance < 0.18:
                    worker.inbox.append(found)

    def restart(self) -> None:
        """Ends all workers and starts them again: no message of the old ones, and no order to them, is left."""
        self.starts += 1
        for left in (self.bus, self.echoes, self.late, self.votes, self.struck, self.noticed):
            left.clear()
        self.workers = [Worker(each.number) for each in self.workers]
        self.complaints = [set() for _ in self.workers]
        self.copies = [set() for _ in self.workers]
        self.broken = None
        self.deliver(events.Restarted, ())
        for worker in self.workers:
            self.join(worker)

    def replace_coordinator(self) -> None:
        """Replaces the coordinator: the new one resumes the written state; events not read before are lost."""
        if self.tell:
            self.tell(f"{self.now:5} another coordinator")
        self.state = resume(to_json(self.state), self.now)
        self.votes.clear()
        kept = int(self.pick() * 3)
        self.bus = self.bus[:kept]
        for worker in self.workers:  # it reads the keys of the members
            if worker.joined and worker.alive:
                self.join(worker)
            elif not worker.alive:
                self.say(events.ExitSeen, worker.number, -9)
        self.deliver(events.TakenOver, ())

    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.state.phase in (Phase.FINISHED, Phase.HALTED)

    # Invariants

    def check_words(self, old: State, kind: type, words: tuple[Any, ...]) -> None:
        """Old messages change nothing, and steps are committed one by one, each by a full ballot of its epoch."""
        new = self.state
        if kind in _ANSWERS and words[1] != old.epoch and new.decided() != old.decided():
            raise Violation(f"{kind.__name__} of epoch {words[1]} counts in epoch {old.epoch}")
        if new.committed != old.committed:
            epoch, number, shadows, _ = words
            if epoch != old.epoch or old.phase is not Phase.RUNNING or number != old.committed + 1:
                raise Violation(f"step {number} of epoch {epoch} is committed after step {old.committed}")
            if shadows:
                self.holders = [{owner, *line} for owner, line in zip(old.owners, shadows, strict=True)]

    def check_epoch(self, old: State) -> None:
        """An epoch follows the one before; the dead have died, the owners live and hold what they own."""
        new = self.state
        if new.epoch <= old.epoch:
            raise Violation(f"epoch {new.epoch} after {old.epoch}")
        if set(new.members) | {each.worker for each in new.verdict} != set(old.members):
            raise Violation("members changed without a verdict")
        for worker, why, cause, *_ in new.verdict:
            if cause is Cause.LEFT:
                guilty = worker in self.noticed and worker not in old.owners and not self.is_missed(worker, old)
            elif cause is Cause.FINISHED:
                guilty = worker in old.done
            else:
                guilty = worker in self.struck or len(self.complaints[worker]) > EVICTED_AFTER
            if not guilty:
                raise Violation(f"worker {worker} {why}, but nothing was done to it")
        for slot, owner in enumerate(new.owners):
            if owner in new.members and owner in self.holders_of(slot):
                self.holders[slot].add(owner)  # a holder of the stage in another pipeline has adopted the slot
            elif not self.has_ended() and (not self.redundant or self.holders_of(slot) & {*new.members}):
                raise Violation(f"worker {owner} owns what it does not hold")

    def check_owners(self, document: PlanMessage) -> None:
        """After the last inventory, every slot has an owner that holds it, and newly healed replicas count."""
        self.owners[document.epoch] = document.owners
        for slot, (owner, shadows) in enumerate(zip(document.owners, document.shadows, strict=True)):
            copies = {worker for worker in document.members if slot in self.copies[worker]}
            known = self.holders_of(slot) | {
                worker for worker in document.members if any(self.is_of(slot, each) for each in self.copies[worker])
            }
            if owner not in document.members or owner not in known:
                raise Violation(f"worker {owner} is to own what it does not hold")
            if not copies <= {owner, *shadows} or not {*shadows} <= self.holders[slot] | copies:
                raise Violation(f"{copies} have new replicas of slot {slot}, and {shadows} are its shadows")
            self.holders[slot] |= {owner, *copies}

    def is_of(self, slot: int, other: int) -> bool:
        """Whether two slots have the same stage."""
        return slot % self.stages == other % self.stages

    def holders_of(self, slot: int) -> set[int]:
        """Returns the workers that hold the stage of a slot, in any pipeline."""
        return {
            each for same in range(slot % self.stages, len(self.holders), self.stages) for each in self.holders[same]
        }

    def is_missed(self, worker: int, old: State) -> bool:
        """Whether a slot could have another shadow, and has none without `worker`."""
        if not self.redundant:
            return False
        staying = [each for each in old.members if each not in old.leaving]
        return any(
            worker in holders and staying not in ([], [owner]) and holders.isdisjoint(set(staying) - {owner})
            for owner, holders in zip(old.owners, self.holders, strict=True)
        )

    def check_phase(self, old: State) -> None:
        """Training goes on with a plan, a job finishes when its last step is committed, and halts for a reason."""
        state = self.state
        if old.phase in GATHERING and state.phase in (Phase.RUNNING, Phase.DRAINING):
            for number in state.members:
                if self.workers[number].epoch < state.epoch or self.workers[number].mode < PLANNED:
                    raise Violation(f"training goes on, but worker {number} has not made the plan")
        healing = () if state.is_over else state.members  # the last commit makes all healed replicas known
        copied = {slot % self.stages for member in healing for slot in self.copies[member]}
        lost = [each for each in state.lost_stages if self.holders_of(each) <= set(state.out) and each not in copied]
        is_lost = state.lost_stages and lost == list(state.lost_stages)
        if state.phase is Phase.FINISHED:
            busy = [worker for worker in state.members if self.workers[worker].mode != DONE]
            if state.committed != state.last_step or (busy and not is_lost and not self.broken):
                raise Violation(f"finished after step {state.committed} of {state.last_step}, with {busy} not done")
        if state.phase is Phase.HALTED:
            legal = {3: self.broken, 80: is_lost, 143: state.committed == -1}
            if state.committed >= state.last_step:
                raise Violation(f"halted with {state.exit_code} when every step was committed: {state.reason}")
            if not legal.get(state.exit_code):
                raise Violation(f"halted with {state.exit_code}: {state.reason}")

    # The workers

    def turn(self, worker: Worker) -> None:
        """A worker reads its orders in sequence; of another epoch it takes only a new epoch, or the end."""
        batches, worker.inbox = worker.inbox, []
        for batch in batches:
            for effect in batch:
                kind = type(effect)
                if worker.alive and (effect.epoch == worker.epoch or kind in _ALWAYS):
                    _OBEY[kind](self, worker, effect)

    def leave(self, worker: Worker, code: int) -> None:
        """A process ends, and its agent sees it."""
        worker.alive = False
        if not self.has_ended():
            self.say(events.ExitSeen, worker.number, code)

    def vote(self, worker: Worker) -> None:
        """A worker votes for its next step, which may complete the ballot."""
        if self.broken and worker.number in self.broken and self.workers[sum(self.broken) - worker.number].alive:
            self.complain(worker, sum(self.broken) - worker.number)
            return
        key = (worker.epoch, worker.committed + 1)
        votes = self.votes[key] = self.votes.get(key, 0) | 1 << worker.number
        published = self.published.get((effects.PublishEpoch, worker.epoch))
        assert isinstance(published, effects.PublishEpoch)
        if self.redundant and self.pick() < 0.1:
            self.copies[worker.number].add(int(self.pick() * len(self.holders)))
        if all(votes >> owner & 1 for owner in self.owners_in(worker.epoch)):
            heals = self.redundant and (self.calm or self.pick() < 0.7)
            waits = not self.calm and self.pick() < 0.2
            self.say(events.StepCommitted, *key, self.healed(published) if heals else (), waits)

    def healed(self, published: effects.PublishEpoch) -> tuple[tuple[int, ...], ...]:
        """Returns one shadow for each slot, a staying worker if there is one."""
        found = []
        for owner in self.owners_in(published.epoch):
            others = [each for each in published.members if each != owner]
            staying = [each for each in others if each not in self.noticed]
            found.append(tuple((staying or others)[:1]))
        return tuple(found)

    def owners_in(self, epoch: int) -> tuple[int, ...]:
        """Returns the owners of an epoch: at first each worker owns a slot."""
        return self.owners.get(epoch, tuple(range(len(self.holders))))

    def complain(self, worker: Worker, peer: int | None) -> None:
        """A transfer failed."""
        for end in (worker.number, worker.number if peer is None else peer):
            self.complaints[end].add(worker.epoch)
        self.say(events.Suspicion, worker.number, worker.epoch, peer)

    def obey_epoch(self, worker: Worker, effect: effects.PublishEpoch) -> None:
        """Leaves the old epoch for good; and the job, if it is no longer a member."""
        if effect.epoch > worker.epoch:
            worker.epoch, worker.mode = effect.epoch, FENCED
            if worker.number not in effect.members:
                self.leave(worker, 86 if worker.number in self.noticed else 85)

    def obey_gather(self, worker: Worker, effect: Effect) -> None:
        """Freezes, and says so as often as it is asked."""
        if worker.mode <= FROZEN:
            worker.mode = FROZEN
            self.say(
                events.InventoryReceived, worker.number, worker.epoch, "", tuple(sorted(self.copies[worker.number]))
            )

    def obey_plan(self, worker: Worker, effect: effects.PublishPlanInput) -> None:
        """Makes the plan."""
        if worker.mode == FENCED or len(effect.document.inventories) != len(effect.document.members):
            raise Violation("a plan without every inventory")
        if effect.document.committed < worker.committed:
            raise Violation(f"a plan after step {effect.document.committed} forgets step {worker.committed}")
        if worker.mode <= PLANNED:
            worker.mode = PLANNED
            self.say(events.PlanAcknowledged, worker.number, worker.epoch, str(effect.epoch))

    def obey_start(self, worker: Worker, effect: Effect) -> None:
        """Trains; told again, it votes again."""
        if worker.mode <= TRAINING:
            worker.mode = TRAINING
            self.vote(worker)

    def obey_commit(self, worker: Worker, effect: effects.AnnounceCommit) -> None:
        """Goes on to the next step, is done, or waits; told again, it votes or is done again."""
        if worker.mode == FROZEN:
            raise Violation("a commit after the inventory")
        if effect.step > worker.committed + 1:
            raise Violation(f"commit of step {effect.step} after step {worker.committed}")
        if effect.step >= worker.committed:
            worker.committed = effect.step
            self.copies[worker.number].clear()
            if effect.then == "end":
                worker.mode = DONE
                self.say(events.Done, worker.number, worker.epoch)
            elif effect.then == "step" and worker.mode == TRAINING:
                self.vote(worker)

    def obey_fence(self, worker: Worker, effect: effects.Fence) -> None:
        if effect.worker == worker.number and worker.number not in self.state.members:
            self.leave(worker, 85)

    def obey_evict(self, worker: Worker, effect: effects.Evict) -> None:
        if effect.worker == worker.number:
            if worker.number not in self.state.out:
                raise Violation(f"worker {worker.number} is killed, but it is not out")
            self.leave(worker, -9)

    def obey_end(self, worker: Worker, effect: Effect) -> None:
        self.leave(worker, 0)

    def obey_nothing(self, worker: Worker, effect: Effect) -> None:
        pass


# Orders that a worker follows in any epoch.
_ALWAYS = frozenset({effects.PublishEpoch, effects.Finish, effects.Halt, effects.Evict, effects.Fence})
_OBEY: dict[type, Any] = {
    effects.PublishEpoch: World.obey_epoch,
    effects.GatherInventories: World.obey_gather,
    effects.PublishPlanInput: World.obey_plan,
    effects.StartTraining: World.obey_start,
    effects.AnnounceCommit: World.obey_commit,
    effects.OrderHandOver: World.obey_nothing,
    effects.Look: World.obey_nothing,
    effects.Evict: World.obey_evict,
    effects.Fence: World.obey_fence,
    effects.Finish: World.obey_end,
    effects.Halt: World.obey_end,
}

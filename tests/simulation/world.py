"""The world of one history: virtual time, channels with delays, and faults.

Rules: all random choices come from the case's seed, so a case has one history. The control plane keeps the order of
messages; the data plane does not. The last transfers of a dying worker may arrive or not. The clock ticks only when a
process waits for it: after a failed transfer, while a worker is stopped, and when nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heappop, heappush
from random import Random
from typing import Any

from engine.core import checkpoint_rules, messages
from engine.core.checkpoint_rules import AbandonedCheckpoint, CompleteCheckpoint, Gathering, KeptMessage
from engine.core.manifest import LayerHash
from engine.core.message_kinds import ToAgent, ToWorker
from engine.core.ownership import Grid, Ownership, Redundancy, directions_of, fresh, with_shadows
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage, PreparedMessage
from engine.core.program.schedules import SCHEDULES
from engine.core.protocol import inputs_outputs
from engine.core.protocol.coordinator_state import begin
from engine.core.protocol.events import (
    JobRestart,
    LeaseExpired,
    MemoryShortage,
    Notice,
    Takeover,
    WantedOwners,
    WantedSchedule,
    WorkerWord,
)
from engine.core.protocol.rebalancing import Rebalancing, wish
from engine.core.protocol.schedule_change import placed_owners
from engine.core.protocol.state import Options, Phase, State
from engine.core.protocol.state import begin as first_membership
from tests.simulation.case import CRAMP, LINK_KINDS, MOVE, SHORT, SHORT_US, USE, Case, Fault, Violation
from tests.simulation.compiled import NAMES, VALUES, parts_of
from tests.simulation.coordinator import Coordinator, job_of, taken_over
from tests.simulation.executor import Executor
from tests.simulation.judge import Judge
from tests.simulation.links import MS, TICK, Links
from tests.simulation.plans import Planned
from tests.simulation.worker import Worker

_SCHEDULES = (("zb1p", "gpipe", "eager-1f1b"), ("zbv", "interleaved", "v-half"))  # of one stage per worker, of two
_COSTS = (MS, MS, 2 * MS, 2 * MS, MS)
_LOADS_AT_MOST = 60 * MS  # a waiting worker may be ready before the first epoch, or in any step
_LONGEST = 400_000 * MS  # virtual time: several times every deadline of the protocol
_MOST_EVENTS = 400_000
MOST_RESTARTS = 3
ASKED = "policy wants other owners"
_SAID_ONCE = (KeptMessage, VoteMessage)  # no coordinator asks for it again in an epoch
_CODES = (-9, -11, 0, 1)  # of a process that dies
_NODES = [f"node-{number}" for number in range(1024)]


@cache
def first_ownership(
    grid: Grid, redundancy: Redundancy, level: int, stages_per_worker: int = 1, schedule: str = "1f1b"
) -> Ownership:
    """Returns the ownership of a fresh job with its shadows."""
    whole = fresh(grid, stages_per_worker, SCHEDULES[schedule].placement, directions_of(schedule))
    return with_shadows(whole, redundancy, level, whole.owners)


@cache
def first_state(ownership: Ownership, redundancy: Redundancy, steps: int, most_workers: int = 0) -> State:
    """Returns the first state of the membership protocol."""
    shadows = ownership.shadows or ((),) * len(ownership.owners)
    redundant = redundancy != "none"
    grid = ownership.grid
    workers = len(ownership.workers())
    sharded = grid.fsdp > 0
    options = Options(
        stages=grid.stages,
        redundant=redundant,
        sharded=sharded,
        max_restarts=MOST_RESTARTS,
        workers=workers,
        most_workers=most_workers,
    )
    return first_membership(options, ownership.owners, shadows, steps - 1, 0)


class World:
    """One job and its faults."""

    coordinator_of: type[Coordinator] = Coordinator
    judge_of: type[Judge] = Judge
    checks_plans = True

    def __init__(self, case: Case, tell: Callable[[str], None] | None = None):
        self.tell_all = tell
        self.spread = case.spread
        self.now = 0
        self.heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.serial = 0
        self.trace = 0
        self.turns: set[str] = set()  # the rare events that have happened
        self.next_tick = 0
        grid = Grid(case.stages, case.microbatches, case.pipelines, case.ties, case.blocks, case.fsdp, case.slices)
        self.retains = case.redundancy != "none" or (case.pipelines > 1 and not case.fsdp)
        how = (case.redundancy, case.level, case.stages_per_worker, case.schedule)
        self.ownership = self.placed(first_ownership(grid, *how), case)
        self.job = job_of(
            *(case.stages, case.pipelines, case.microbatches, case.redundancy, case.level, case.steps),
            case.validate_every,
            case.keep_every,
            case.blocks,
            case.elastic,
            case.fsdp,
            case.schedule,
            case.early_stop,
            case.predicts,
            case.residuals,
            case.stages_per_worker,
            case.slices,
        )
        self.grid = grid
        self.members = self.ownership.workers()
        self.numbers = tuple(range(len(self.members) + case.waiting))
        self.workers: list[Worker] = []
        self.links = Links(self)
        self.takes(case)
        self.deaths = list(case.deaths)
        self.seen: dict[tuple[int, str], int] = {}
        self.struck: list[Fault] = []
        self.starts = 0
        self.wished: tuple[int, ...] = ()  # the owners that were wanted last
        self.asked = Rebalancing(())  # by the host agent, which asks the policy
        self.is_asking = False
        self.is_restarting = False
        self.written = begin(self.job, self.first_state(), 0)  # in the store
        self.coordinator = self.coordinator_of(self, self.written)
        self.reached = 0  # moments of the present coordinator
        self.is_stopped = False
        self.gathering = Gathering()  # at the host agent
        self.whole: set[int] = set()  # the steps of whole checkpoints
        self.judge = self.judge_of(self, grid)
        self._start()

    def placed(self, ownership: Ownership, case: Case) -> Ownership:
        """Returns the first ownership of a case, with the shadows where they are to stand."""
        return ownership

    def first_state(self) -> State:
        """Returns the first state of the membership protocol."""
        return first_state(self.ownership, self.case.redundancy, self.case.steps, self.case.most_workers)

    def takes(self, case: Case) -> None:
        """Takes the seed and the faults of a case of its shape."""
        self.case = case
        self.pick: Callable[[], float] = Random(case.seed).random if case.spread else float  # noqa: S311
        self.exit_lag = MS // 10 if case.seed % 2 else MS
        self.loses = case.seed // 2 % 2
        self.links.counts = any(fault.kind in LINK_KINDS for fault in case.faults)
        self.faults: list[list[Fault]] = [[] for _ in self.numbers]
        for fault in case.faults:
            if fault.worker < len(self.numbers):
                self.faults[fault.worker].append(fault)
        for worker in self.workers:
            worker.case = case
            self._watch(worker)

    def _start(self) -> None:
        """Starts all workers."""
        self.starts += 1
        self.told_early: list[tuple[int, ToAgent]] = []  # the messages that the host agent tells the next coordinator
        self.unheard: list[tuple[int, ToAgent]] = []  # the messages that have come since a coordinator died
        self.ended: dict[int, int] = {}  # the exit code of each worker whose end the host agent has seen
        self.workers = [Worker(self, number) for number in self.numbers]
        self.said_ready: set[int] = set()  # the waiting workers that have said so
        self.passes: dict[tuple[int, int], set[int]] = {}  # the owners that have ended a validation pass
        self.plans: dict[tuple[int, str], Planned] = {}  # of which workers were told parts, by epoch and digest
        self.heard_at = [0] * len(self.workers)
        self.said_at = [0] * len(self.workers)
        self.links.groups.clear()
        for worker in self.workers:
            self._watch(worker)
            if worker.number in self.members:
                self.push(self.delay(), worker.start)
            else:
                self.push(self.delay() + int(self.pick() * _LOADS_AT_MOST * (1 + 3 * self.case.elastic)), worker.start)

    def is_eager(self, number: int) -> bool:
        """Whether a worker that waits joins without a failure."""
        return number >= len(self.numbers) - self.case.joining

    def restart(self) -> None:
        """Ends all workers, and starts them again; the messages of the ended ones come no more."""
        if self.is_restarting:
            return
        self.is_restarting = True
        self.turns.add("job is started again")
        for worker in self.workers:
            worker.alive = False
        self.push(MS, self._restarted)

    def _restarted(self) -> None:
        if not self.coordinator.alive:
            self.push(MS, self._restarted)
            return
        self.is_restarting = False
        self.coordinator.take(JobRestart)
        self._start()

    @property
    def membership(self) -> State:
        """The state of the membership protocol at the present coordinator."""
        return self.coordinator.state.membership

    # Time

    def run(self, until_begun: bool = False) -> None:
        """Runs the history, or the start up to the first epoch; raises Violation if a promise is broken."""
        heap = self.heap
        for _ in range(_MOST_EVENTS + 2 * len(self.workers) ** 2):  # each worker hears of the border of each other
            if not heap:
                if self.is_over() or not self._wait_for_clock():
                    return
                continue
            self.now, _, what, words = heappop(heap)
            if self.now > _LONGEST:
                break
            what(*words)
            if until_begun and self.membership.epoch:
                return
        raise Violation(f"stuck while {self.membership.phase} in epoch {self.membership.epoch}")

    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.is_stopped or self.membership.phase in (Phase.FINISHED, Phase.HALTED)

    def _wait_for_clock(self) -> bool:
        self.tick_after(TICK)
        return True

    def push(self, delay: int, what: Callable[..., None], *words: Any) -> None:
        """Schedules a call after a delay."""
        self.serial += 1
        heappush(self.heap, (self.now + delay, self.serial, what, words))

    def delay(self) -> int:
        """Returns the delay of a message."""
        if not self.spread:
            return MS // 10
        drawn = self.pick()
        return int(MS // 20 + drawn**4 * self.spread * MS)

    def cost(self, code: int) -> int:
        """Returns the time of an action."""
        return _COSTS[code] if not self.spread else int(_COSTS[code] * (0.5 + self.pick()))

    def planning(self) -> int:
        """Returns the time to make a plan, or to form a group."""
        return MS if not self.spread else int(self.pick() ** 4 * 40 * MS)

    def lag(self) -> int:
        """Returns the time until a waiting worker notices a message."""
        return 0 if not self.spread or self.pick() < 0.5 else self.delay()

    def tick_after(self, delay: int) -> None:
        """Schedules a tick of the clock after a delay, unless an earlier one is scheduled."""
        at = self.now + delay
        if not self.now < self.next_tick <= at:
            self.next_tick = at
            self.push(delay, self._tick)

    def _tick(self) -> None:
        """Sends heartbeats and a tick to the coordinator; schedules the next tick while a worker is stopped."""
        if self.is_over():
            return
        for worker in self.workers:
            if worker.alive and not worker.paused:
                self.coordinator.take(WorkerWord, worker.number, worker.heartbeat(), self.node_of(worker.number))
        self.coordinator.take(inputs_outputs.ClockTick)
        if (
            self.membership.look
            or self.now < self.links.until
            or any(worker.alive and worker.paused for worker in self.workers)
        ):
            self.tick_after(TICK)

    def _passes(self) -> None:
        """Shows the coordinator the time that a leaving worker has left."""
        self.coordinator.take(inputs_outputs.ClockTick)

    # The policy

    def look_at_members(self) -> None:
        """Lets the host agent of an elastic job look at the members at its next tick."""
        if self.case.elastic and not self.is_asking:
            self.is_asking = True
            self.push(self.delay() * 5, self._ask)

    def _ask(self) -> None:
        self.is_asking = False
        if self.is_over() or not self.coordinator.alive:
            return
        self.asked, _, wanted = wish(self.asked, self.job, self.membership, self.now)
        if wanted is not None:
            self.turns.add(ASKED)
            self.coordinator.take(WantedOwners, wanted.owners, wanted.why)

    # Coordinators

    def reach(self) -> bool:
        """Counts a moment of the coordinator; returns whether it still lives after it."""
        self.reached += 1
        if self.deaths and self.reached == self.deaths[0]:
            self.deaths.pop(0)
            self.coordinator.alive = False
            self.turns.add(f"coordinator dies while {self.membership.phase}")
            self.push(min(self.delay() * 10, 100 * MS), self._take_over)
        return self.coordinator.alive

    def _take_over(self) -> None:
        """Lets the waiting coordinator go on from the store."""
        self.turns.add("another coordinator takes over")
        self.coordinator = taken_over(self)
        self.reached = 0
        self.coordinator.take(Takeover)
        for number, code in self.ended.items():
            self.coordinator.take(inputs_outputs.ProcessExit, number, code)
        for number in sorted(self.said_ready):
            self.coordinator.take(
                WorkerWord, number, messages.WaitingMessage(self.is_eager(number)), self.node_of(number)
            )
        unheard, self.unheard = self.unheard, []
        for number, message in unheard:
            self._hear(number, message, self.starts)
        if self.membership.phase is Phase.FORMING:
            for number, message in self.told_early:
                self.coordinator.take(WorkerWord, number, message, self.node_of(number))

    def stop(self, why: inputs_outputs.Stop) -> None:
        """Ends the run."""
        self.coordinator.alive = False
        self.is_stopped = True

    # Messages

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Sends a message of the coordinator to a worker, after all earlier ones."""
        at = self.heard_at[worker.number] = max(self.heard_at[worker.number], self.now + self.delay())
        self.push(at - self.now, worker.told, message)

    def say(self, number: int, message: ToAgent) -> None:
        """Sends a message of a worker to the coordinator, after all earlier ones."""
        at = self.said_at[number] = max(self.said_at[number], self.now + self.delay())
        self.push(at - self.now, self._hear, number, message, self.starts)
        if self.case.again and not isinstance(message, _SAID_ONCE) and self.pick() * self.case.again < 1:
            self.push(at - self.now + self.delay() * 20, self._hear, number, message, self.starts)

    def _hear(self, number: int, message: ToAgent, start: int) -> None:
        if start != self.starts or self.is_restarting:
            return
        if isinstance(message, KeptMessage):
            self._part_came(number, message)
            return
        if isinstance(message, messages.WaitingMessage):
            self.said_ready.add(number)
        if self.membership.phase in (Phase.FORMING, Phase.RESTARTING):  # a restart may still be being written
            self.told_early.append((number, message))
        elif not self.coordinator.alive and not self.loses:
            self.unheard.append((number, message))
        if not self.coordinator.alive:
            return
        self.note(WORDS.get(type(message), OTHER), number)
        self.coordinator.take(WorkerWord, number, message, self.node_of(number))

    def await_parts(self, step: int) -> None:
        """Awaits the parts of a checkpoint; its hashes agree. A stage counts as a layer."""
        self.gathering = checkpoint_rules.order(self.gathering, step)
        if step in self.gathering.pending:
            layers = tuple(LayerHash(stage, "", "") for stage in range(self.case.stages))
            self.gathering, settled = checkpoint_rules.close(self.gathering, step, layers)
            self._settle(settled)

    def _part_came(self, number: int, told: KeptMessage) -> None:
        if number not in self.membership.out:
            self.gathering, settled = checkpoint_rules.add_part(self.gathering, told.step, told.part)
            self._settle(settled)

    def _settle(self, settled: Iterable[CompleteCheckpoint | AbandonedCheckpoint]) -> None:
        self.whole.update(each.step for each in settled if isinstance(each, CompleteCheckpoint))

    def note(self, *numbers: int) -> None:
        """Adds to the hash of the history."""
        self.trace = hash((self.trace, self.now, *numbers))
        if self.tell_all:
            self.show(*numbers)

    def show(self, *numbers: int) -> None:
        """Shows an event in a replay; the hash of the history is without it."""
        if self.tell_all:
            self.tell_all(f"{self.now / MS:10.3f} ms  {_in_words(numbers)}")

    # Faults

    def strike(self, worker: Executor, point: str) -> None:
        """Applies the faults that are due at a moment of a worker."""
        number, faults = worker.number, self.faults[worker.number]
        for fault in [each for each in faults if each.point == "moment" and each.at == worker.moments]:
            faults.remove(fault)
            self.hit(worker, fault)
        for each in (point, "replayed") if worker.epoch > 1 and point in _REPLAYED else (point,):
            count = self.seen[number, each] = self.seen.get((number, each), 0) + 1
            for fault in [one for one in faults if one.point == each and one.at == count]:
                faults.remove(fault)
                self.hit(worker, fault)
        self._watch(worker)

    def _watch(self, worker: Executor) -> None:
        """Notes the next moment of a worker to check; if the moment is not known before, all of them."""
        faults = self.faults[worker.number]
        worker.watched = any(fault.point != "moment" for fault in faults)
        worker.trap = min((fault.at for fault in faults if fault.at > worker.moments), default=0)

    def decided(self, step: int) -> None:
        """Handles a decided commit that no worker knows yet."""
        for worker in self.workers:
            if worker.watched and worker.alive and not worker.paused:
                self.strike(worker, "decided")

    def hit(self, worker: Executor, fault: Fault) -> None:
        """Applies a fault to a worker."""
        if not worker.alive:
            return
        self.struck.append(fault)
        self.note(_STRUCK, worker.number)
        self.judge.guilty(worker, fault)
        length = fault.length * 1000
        if fault.kind == "kill":
            self.end(worker, _CODES[self.case.seed % len(_CODES)])
        elif fault.kind == "zombie":
            self.push(self.delay(), self._lose_node, worker.number)
            self.heard_at[worker.number] = self.now + length
        elif fault.kind == "pause":
            worker.paused = True
            self.push(length, worker.resume)
            self.tick_after(TICK)
        elif fault.kind in LINK_KINDS:
            self.links.strike(worker, fault)
        elif fault.kind == "suspect":
            worker.transfer_failed(None if fault.length == 0 else fault.length % len(self.workers))
        elif fault.kind == "stop":
            self.coordinator.take(Notice, None, length)
        elif fault.kind == "notice":
            self.coordinator.take(Notice, worker.number, length)
        elif fault.kind == SHORT:
            self.coordinator.take(Notice, worker.number, SHORT_US * 1000)
            self.push(SHORT_US * 1000, self.end, worker, -9)
            for after in (5, 10, 20, 40, 80):
                self.push(after * MS, self._passes)
        else:
            self._want(fault)

    def _want(self, fault: Fault) -> None:
        """Tells the coordinator of other owners, of another schedule, or who has too little memory."""
        if fault.kind == MOVE:
            self.wished = self.wanted(fault.length)
            self.coordinator.take(WantedOwners, self.wished, "a test")
        elif fault.kind == USE:
            schedule = self.schedules[fault.length % len(self.schedules)]
            owners = placed_owners(self.job, schedule, self.membership.owners)
            self.coordinator.take(WantedSchedule, schedule, "a test", owners)
        elif fault.kind == CRAMP:
            self.coordinator.take(MemoryShortage, self.cramped(fault.length))

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that fit the case; the first one is its own."""
        return ("", *_SCHEDULES[self.case.stages_per_worker > 1])

    def cramped(self, number: int) -> dict[int, str]:
        """Returns the workers with too little memory of a number, also those that are members; none of some numbers."""
        rng = Random(number)  # noqa: S311
        numbers = self.numbers[len(self.members) :]
        return {each: "waits on" for each in numbers if rng.random() < 0.7} if number % 3 else {}

    def wanted(self, number: int) -> tuple[int, ...]:
        """Returns the wanted owners of a number: any workers, dead ones too; of some numbers, those of the start."""
        rng, now = Random(number), self.membership.owners  # noqa: S311
        if number % 5 == 0:
            return self.ownership.owners
        return tuple(rng.choice((owner, rng.randrange(len(self.workers)))) for owner in now)

    def evict(self, worker: Executor) -> None:
        """Kills an excluded worker for the agent; it cannot reach a worker whose lease has expired."""
        if worker.alive:
            self.push(self.delay(), self.end, worker, -9)

    def end(self, worker: Executor, code: int) -> None:
        """Ends a process: its agent sees it, and its peers later."""
        if not worker.alive:
            return
        worker.alive = False
        if self.is_over():
            return
        self.push(self.exit_lag if not self.spread else self.delay(), self._seen, worker, code)
        self.links.break_all(worker)

    def _seen(self, worker: Executor, code: int) -> None:
        number = worker.number
        if self.workers[number] is not worker or self.is_restarting:
            return
        self.note(_ENDED, number)
        self.ended[number] = code
        self.coordinator.take(inputs_outputs.ProcessExit, number, code)
        if number in self.said_ready and self.case.seed % 2:  # its word comes again, and late
            self.coordinator.take(
                WorkerWord, number, messages.WaitingMessage(self.is_eager(number)), self.node_of(number)
            )

    def node_of(self, number: int) -> str:
        """Returns the host of a worker."""
        return _NODES[number if self.case.loses_a_host else number // 2]

    def _lose_node(self, number: int) -> None:
        self.coordinator.take(LeaseExpired, self.node_of(number))


def _in_words(numbers: tuple[int, ...]) -> str:
    """Returns noted numbers in words, for the replay of a case."""
    first, second, *third = numbers
    said = {code: kind for kind, code in WORDS.items()}
    if first in said:
        return f"the coordinator hears of worker {second}: {said[first].__name__}"
    if first < 0:
        if first == OTHER:
            return f"the coordinator hears of worker {second}: another message"
        return f"worker {second} is {'struck' if first == _STRUCK else 'seen to have ended'}"
    if third:
        return f"worker {first}: {NAMES[second]}, action {third[0]} of its program"
    kind, pipeline, stage, index = parts_of(first)
    return f"worker {second} receives {VALUES[kind]} {index} of slot {(pipeline, stage)}"


_STRUCK, _ENDED, OTHER = -2, -3, -4
WORDS: dict[type[ToAgent], int] = {
    messages.SuspicionMessage: -10,
    InventoryMessage: -11,
    PlannedMessage: -12,
    messages.FinishedMessage: -13,
    VoteMessage: -14,
    PreparedMessage: -15,
    messages.ReadyMessage: -16,
    messages.WaitingMessage: -18,
    messages.ValidationMessage: -17,
}
_REPLAYED = frozenset({"F", "f", "B", "I", "W", "HEAL", "REDUCE_GRAD", "LOG", "COMMIT"})

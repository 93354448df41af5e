"""The world of a history on several hosts: an agent on each, one of which coordinates, and another one after it.

    coordinator's agent   what it tells and decides --->  agent of each host  ---> its workers
                          <--- words, ends                                    <--- words, ends

Rules: the streams between two hosts keep their order. What a lost host had sent arrives up to some frame. Each agent
keeps what `ReplicatedResults` and `ReplayBuffer` keep, and the one that takes over goes on as `succession` says. A host
can be lost at each moment of a coordinator, also of one that is about to be one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.codec.documents import documents, resume
from engine.codec.messages import decode, encode
from engine.codec.records import encoded
from engine.core import messages
from engine.core.checkpoint_rules import Gathering, KeptMessage
from engine.core.deadlines import LATER_NS
from engine.core.errors import KILLED, CoordinatorUnavailableError
from engine.core.history.run_records import StampedRecord
from engine.core.hosts.ends import BACK_NS, SILENT_NS, deal, host_for_one_more
from engine.core.message_kinds import ToAgent, ToWorker
from engine.core.messages import NoticeMessage
from engine.core.ownership import Ownership, with_shadows
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import InventoryMessage, PlannedMessage, PreparedMessage
from engine.core.protocol import inputs_outputs
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import LeaseExpired, Notice, Takeover, WorkerWord
from engine.core.protocol.state import State
from engine.core.protocol.succession import ProcessOnHost, succession
from engine.runtime.agent.host_servers import KEPT, ReplayBuffer, ReplicatedResults
from engine.runtime.agent.run_state import RunState, audit_record
from tests.simulation.case import HOST_KINDS, Case, Fault
from tests.simulation.coordinator import Coordinator
from tests.simulation.executor import Executor
from tests.simulation.host_judge import HostJudge
from tests.simulation.links import MS, TICK
from tests.simulation.worker import Worker
from tests.simulation.world import OTHER, WORDS, World

_LEASE_NS = 5_000 * MS
_GUARDED_NS = 1_000 * MS  # before that, a host ends its workers
_REFUSED_NS = 100 * MS  # until it is sure that the port of an agent refuses
_NEVER = 1 << 62
_NAMES = tuple("abcdefgh")
_SLEEP = 1_200 * MS
_GRACE_NS = 60_000 * MS
_ASKED_AGAIN = (
    InventoryMessage,
    PlannedMessage,
    PreparedMessage,
    VoteMessage,
)  # the frequent words; `ReplayBuffer` has none
TAKEN, AGAIN = "another host takes over", "a second host takes over"
HEIR_LOST, AT_ONCE = "host is lost that takes over", "two hosts are lost at once"
_TO, _FROM = 0, 1  # the ways of a stream: from the coordinator to an agent, and back


class HostAgent:
    """The agent of one host; `follows` is the term of the coordinator that it serves."""

    def __init__(self, world: HostWorld, name: str):
        self.name = name
        self.alive = True
        self.is_silent = False
        self.follows = 1
        self.heard = ReplicatedResults(world.job)
        self.said: dict[int, ReplayBuffer] = {}
        self.ended: dict[int, int] = {}
        self.last_at = [0, 0]  # when the last frame of a way comes
        self.cut_at = [_NEVER, _NEVER]  # no frame comes after that

    @property
    def serves(self) -> bool:
        """Whether it says and hears anything."""
        return self.alive and not self.is_silent


class HostCoordinator(Coordinator):
    """A coordinator on one of several hosts: the others hear what it records."""

    world: HostWorld

    def _carry_out(self, found: tuple[inputs_outputs.CoordinatorOutput, ...]) -> None:
        for output in inputs_outputs.recorded_first(found):
            if not self.alive:
                return
            if isinstance(output, inputs_outputs.Write):
                self.world.record(output.record)
            else:
                super()._carry_out((output,))

    def _write(self, *decision: Any) -> None:
        """Writes a decision; its agent, which has one thread, handles meanwhile nothing."""
        super()._write(*decision)
        self.world.go_on()

    def _wake(self, *decision: Any) -> None:
        """Goes on with its decision when another one coordinates."""
        if self.world.coordinator is self and not self.world.is_stopped:
            self.world.push(_SLEEP, self._wake, *decision)
        else:
            super()._wake(*decision)


class HostWorld(World):
    """One job on several hosts, and its faults."""

    coordinator_of = HostCoordinator
    judge_of = HostJudge
    judge: HostJudge

    def __init__(self, case: Case, tell: Callable[[str], None] | None = None):
        self.agents: dict[str, HostAgent] = {}
        self.control = 0  # moments of all coordinators
        self.term = 1  # of the coordinator, or of the one that is about to be it
        self.chief: HostAgent | None = None  # the agent that coordinates
        self.heir: HostAgent | None = None  # the agent that is about to
        self.before = _NAMES[0]  # the host that coordinated last
        self.held: dict[str, tuple[tuple[int, ...], ...]] = {}  # the processes of the hosts that came to the heir
        self.words: dict[str, list[tuple[int, bytes]]] = {}  # and what they said again
        self.told: dict[str, tuple[int, dict[int, str]]] = {}  # and how much they have heard, and what of it is new
        self.decisions = 0  # that were told to hosts so far
        self.early: dict[str, list[Callable[[], object]]] = {}  # what came before the heir could handle it
        self.waiting: list[Callable[[], object]] = []  # what the agent that coordinates handles after a write
        self.known_lost: set[str] = set()  # to the present coordinator
        self.lost_at = -1  # when a host was lost last
        self.revoked: set[str] = set()  # the hosts whose leases are over
        super().__init__(case, tell)

    def placed(self, ownership: Ownership, case: Case) -> Ownership:
        """Returns the ownership with shadows on other hosts."""
        names, members = _NAMES[: case.hosts], ownership.workers()
        self.host_of = deal(members, names)
        how = (case.redundancy, case.level, members)
        found = with_shadows(replace(ownership, shadows=()), *how, host_of=self.host_of)
        for number in range(len(members), len(members) + case.waiting):
            self.host_of[number] = host_for_one_more(self.host_of, names)
        return found

    def first_state(self) -> State:
        """Returns the first state of the protocol, in which a look is longer than the loss of a host takes."""
        state = super().first_state()
        options = replace(state.options, look_ns=state.options.look_ns + LATER_NS)
        return state._replace(options=options)

    def _start(self) -> None:
        self.agents = {name: HostAgent(self, name) for name in _NAMES[: self.case.hosts]}
        for number, name in self.host_of.items():
            self.agents[name].said[number] = ReplayBuffer()
        if not self.starts:
            self.losses = sorted(self.case.losses, key=lambda loss: loss.at)
        self.chief = self.agents[_NAMES[0]]
        super()._start()

    @property
    def results(self) -> RunState:
        """The results at the host that coordinates, or did so last."""
        return self.agents[self.before].heard.results

    def agent_of(self, number: int) -> HostAgent:
        """Returns the agent of a worker."""
        return self.agents[self.host_of[number]]

    def node_of(self, number: int) -> str:
        """Returns the host of a worker."""
        return self.host_of[number]

    def is_over(self) -> bool:
        """Whether the run has ended; a decision of a lost coordinator ends nothing."""
        return self.is_stopped or (self.coordinator.alive and self.chief is not None and super().is_over())

    def restart(self) -> None:
        """Starts all workers again, or ends the run if a host for them is missing."""
        if all(each.serves for each in self.agents.values()) and self.term == 1:
            super().restart()
        else:
            self.judge.may_end_early("no process can be started on a lost host")
            self.stop_run()

    def stop_run(self) -> None:
        """Ends the run."""
        self.coordinator.alive = False
        self.is_stopped = True

    # Streams

    def _send(self, agent: HostAgent, way: int, what: Callable[..., object], *words: Any) -> None:
        """Sends a frame over the stream between the coordinator of this term and an agent."""
        at = agent.last_at[way] = max(agent.last_at[way], self.now + self.delay())
        self.push(at - self.now, self._arrive, agent, way, self.term, what, words)

    def _arrive(
        self, agent: HostAgent, way: int, term: int, what: Callable[..., object], words: tuple[Any, ...]
    ) -> None:
        if agent.follows != term or self.now > agent.cut_at[way]:
            return
        if way == _TO and agent.serves:
            what(*words)
        elif way == _FROM and term == self.term:
            if agent.name in self.early:
                self.early[agent.name].append(partial(what, *words))
            elif self.chief is not None and agent.name not in self.known_lost:
                self.handle(what, *words)

    def tell(self, worker: Worker, message: ToWorker) -> None:
        """Sends a message of the coordinator over the agent of a worker."""
        self._send(self.agent_of(worker.number), _TO, worker.told, message)

    def say(self, number: int, message: ToAgent) -> None:
        """Sends a message of a worker to its agent, which keeps it if it is said once only, and relays it."""
        at = self.said_at[number] = max(self.said_at[number], self.now + self.delay() // 4)
        self.push(at - self.now, self._relay, number, message, self.starts)

    def _relay(self, number: int, message: ToAgent, start: int) -> None:
        agent = self.agent_of(number)
        if start != self.starts or self.is_restarting or not agent.serves:
            return
        self.judge.said(number, message)
        if not isinstance(message, _ASKED_AGAIN):
            agent.said[number].add(encode(message))
        self._send(agent, _FROM, self.hears, number, message)

    def _seen(self, worker: Executor, code: int) -> None:
        number, agent = worker.number, self.agent_of(worker.number)
        if self.workers[number] is not worker or self.is_restarting or not agent.serves:
            return
        agent.ended[number] = code
        self._send(agent, _FROM, self.hears_end, number, code)

    # The agent that coordinates

    def handle(self, what: Callable[..., object], *words: Any) -> None:
        """Lets the agent that coordinates handle an input, after all earlier ones."""
        self.waiting.append(partial(what, *words))
        self.go_on()

    def go_on(self) -> None:
        """Lets the agent that coordinates handle its inputs, unless it waits for the store."""
        while self.waiting and self.chief is not None and not self.coordinator.is_writing:
            self.waiting.pop(0)()

    def hears(self, number: int, message: Any) -> None:
        """Handles a message of a worker: its own part of it, and then the coordinator."""
        if number in self.membership.out:
            return
        self.note(WORDS.get(type(message), OTHER), number)
        if isinstance(message, messages.AuditMessage):
            self.results.audit(number, message)
            self.record(audit_record(number, message))
        elif isinstance(message, messages.CutMessage):
            self.results.cut(message)
        if isinstance(message, KeptMessage):
            self._part_came(number, message)
        elif isinstance(message, NoticeMessage):
            self.coordinator.take(Notice, number, _GRACE_NS)
        else:
            self.coordinator.take(WorkerWord, number, message, self.node_of(number))

    def hears_end(self, number: int, code: int) -> None:
        """Handles the end of a worker; that of one on a lost host is the loss of the host."""
        name = self.host_of[number]
        if name in self.known_lost and number not in self.membership.out:
            self.coordinator.take(LeaseExpired, name)
        self.coordinator.take(inputs_outputs.ProcessExit, number, code)

    def record(self, record: StampedRecord) -> None:
        """Records a decision, unless that was done before, and lets the other hosts hear of it."""
        self.judge.recorded(record)
        if not self.results.books(record) or not isinstance(record, KEPT):
            return
        line = encoded(replace(record, at_ns=record.at_ns or self.now + 1))
        number, self.decisions = self.decisions, self.decisions + 1
        for name, agent in self.agents.items():
            if name != self.before and name not in self.known_lost:
                self._send(agent, _TO, agent.heard.take, number, line)
                if not self.reach():
                    return

    def reach(self) -> bool:
        """Counts a moment of the coordinator, at which hosts may be lost; returns whether it still lives after it."""
        super().reach()
        self.moment()
        return self.coordinator.alive

    def moment(self) -> None:
        """Counts a moment of a coordinator, or of an heir."""
        self.control += 1
        while self.losses and self.losses[0].at <= self.control:
            loss = self.losses.pop(0)
            first = self.heir or self.chief
            there = [each for each in self.agents.values() if each.serves and each is not first]
            if loss.which == 0 and first is not None:
                self.lose(first, loss.kind)
            elif there:
                self.lose(there[loss.which % len(there)], loss.kind)

    def _tick(self) -> None:
        if self.is_over():
            return
        for worker in self.workers:
            agent = self.agent_of(worker.number)
            if worker.alive and agent.serves and agent.follows == self.term and agent.name not in self.early:
                self.coordinator.take(WorkerWord, worker.number, worker.heartbeat(), agent.name)
        self.coordinator.take(inputs_outputs.ClockTick)
        if self.chief is not None and self.membership.look:
            self.tick_after(TICK)

    # Losses

    def hit(self, worker: Executor, fault: Fault) -> None:
        """Applies a fault to a worker, or to its host."""
        if fault.kind in HOST_KINDS:
            if worker.alive and self.agent_of(worker.number).serves:
                self.struck.append(fault)
                self.lose(self.agent_of(worker.number), fault.kind)
        elif fault.kind == "notice":
            self.struck.append(fault)
            self.judge.guilty(worker, fault)
            self.say(worker.number, NoticeMessage())
        else:
            super().hit(worker, fault)

    def lose(self, agent: HostAgent, kind: str) -> None:
        """Takes a host out of the run."""
        self.turns.add(f"host is lost: {kind}")
        if self.tell_all:
            self.tell_all(f"{self.now / MS:10.3f} ms  host {agent.name} is lost: {kind}, moment {self.control}")
        workers = [self.workers[number] for number, name in self.host_of.items() if name == agent.name]
        self.judge.host_lost(agent.name, kind)
        if kind == "silent":
            agent.is_silent = True
            for worker in workers:
                self.push(_LEASE_NS - _GUARDED_NS + int(self.pick() * 2 * _GUARDED_NS), self._ends_unseen, worker)
        else:
            agent.alive = False
            for worker in workers:
                worker.alive = False
                if kind == "agent":  # of a host without power, not even the end of a connection is seen
                    self.links.break_all(worker)
        self._cut(agent)
        if agent is self.heir:
            self.turns.add(HEIR_LOST)
        if self.lost_at == self.now:
            self.turns.add(AT_ONCE)
        self.lost_at = self.now
        if agent is self.chief or agent is self.heir:
            self.revoked.add(agent.name)
            self.coordinator.alive = False
            self.chief = self.heir = None
            self.turns.add(f"coordinator is lost while {self.membership.phase}")
            wait = _REFUSED_NS if kind == "agent" else _LEASE_NS
            self.push(int(wait * (1 + self.pick())), self._elect, self.term)
        else:
            wait = BACK_NS if kind == "agent" else SILENT_NS
            self.push(wait + self.delay(), self._detect, agent, self.term)

    def _ends_unseen(self, worker: Executor) -> None:
        if worker.alive:
            worker.alive = False
            self.links.break_all(worker)

    def _cut(self, agent: HostAgent) -> None:
        """Lets frames of a lost host arrive up to some frame, which differs by stream."""
        lost = [(agent, _FROM)]
        if agent is self.chief or agent is self.heir:
            lost += [(each, _TO) for each in self.agents.values()]
        for each, way in lost:
            last = max(each.last_at[way], self.now)
            part = self.pick() if self.spread else self.loses
            each.cut_at[way] = min(each.cut_at[way], self.now + int((last - self.now) * part))

    def _detect(self, agent: HostAgent, term: int) -> None:
        """Lets the coordinator count a host as lost, with all its workers."""
        if term != self.term or self.chief is None or agent.name in self.known_lost or self.is_over():
            return
        self.known_lost.add(agent.name)
        self.revoked.add(agent.name)
        for number, name in self.host_of.items():
            if name == agent.name:  # of an end that it had seen, the word may be lost with it
                self.push(self.delay(), self._of_term, term, self.hears_end, number, KILLED)

    def _of_term(self, term: int, what: Callable[..., object], *words: Any) -> None:
        if term == self.term and self.chief is not None:
            self.handle(what, *words)

    # Take-over

    def _elect(self, term: int) -> None:
        """Makes one of the hosts that are left the next one that coordinates; the others follow it."""
        there = [each for each in self.agents.values() if each.serves]
        if term != self.term or self.is_over():
            return
        if not there:
            self.judge.may_end_early("no host is left")
            self.stop_run()
            return
        self.term += 1
        self.waiting = []
        self.heir = there[int(self.pick() * len(there))] if self.spread else there[self.term % len(there)]
        self.held, self.words, self.told, self.early = {}, {}, {}, {}
        for each in self.agents.values():
            each.cut_at[_TO] = _NEVER
        for each in there:
            self.push(0 if each is self.heir else self.delay() * 5, self._follow, each, self.term)
        self.push(SILENT_NS, self._resume, self.term)
        self.moment()

    def _follow(self, agent: HostAgent, term: int) -> None:
        """Lets an agent serve the next coordinator: it says which processes it has, and some words again."""
        if term != self.term or not agent.serves or self.heir is None:
            return
        agent.follows = term
        told = (agent.heard.count, agent.heard.last_since(self.heir.heard.count))
        held = tuple((number, number, number, *_code(agent, number)) for number in agent.said)
        words = [(number, packet) for number, said in agent.said.items() for packet in said.packets]
        self.early[agent.name] = [partial(self.hears, number, decode(packet)) for number, packet in words]
        at = agent.last_at[_FROM] = self.now + self.delay()
        self.push(at - self.now, self._come, agent, term, held, words, told)

    def _come(
        self,
        agent: HostAgent,
        term: int,
        held: tuple[tuple[int, ...], ...],
        words: list[tuple[int, bytes]],
        told: tuple[int, dict[int, str]],
    ) -> None:
        if term != self.term or self.now > agent.cut_at[_FROM]:
            return
        self.held[agent.name], self.words[agent.name], self.told[agent.name] = held, words, told
        self.moment()
        if self.heir is not None and {*self.held} == {*self.agents} - self.revoked:
            self._resume(term)

    def _resume(self, term: int) -> None:
        """Lets the heir go on with the run."""
        heir = self.heir
        if term != self.term or heir is None:
            return
        known = resume(self.job, documents(self.written), self.now)
        heir.heard.complete(told for _, told in self.told.values())
        try:
            taken = succession(known, self.held, self.before, heir.heard.results.committed)
        except CoordinatorUnavailableError as error:
            self.judge.may_end_early(str(error))
            self.stop_run()
            return
        for name in self.held:
            for number, packet in self.words[name]:
                heir.heard.hear_again(number, packet)
        heir.heard.results.taken_over(self.now)
        self._take_over_with(heir, known, taken)

    def _take_over_with(self, heir: HostAgent, known: CoordinatorState, taken: tuple[ProcessOnHost, ...]) -> None:
        self.turns.add(AGAIN if TAKEN in self.turns else TAKEN)
        self.written = known
        self.coordinator = self.coordinator_of(self, self.written)
        lost, self.before = self.before, heir.name
        self.chief, self.heir = heir, None
        self.known_lost = {*self.agents} - {*self.held}
        self.gathering, term = Gathering(), self.term
        self._tell_results(heir)
        self.judge.taken_over()
        self.coordinator.take(Takeover, lost)
        for each in taken:
            if each.ended or each.host in self.known_lost:
                code = each.ended[0] if each.ended else KILLED
                self.push(self.delay(), self._of_term, term, self.hears_end, each.worker, code)
        for name in self.agents:
            if name in self.held:
                self.push(self.delay(), self._replay, name, term)
            if name in self.held and not self.agents[name].serves:
                self.push(SILENT_NS, self._detect, self.agents[name], term)

    def _tell_results(self, heir: HostAgent) -> None:
        """Lets the other hosts hear what they have not heard, and the heir has."""
        self.decisions = heir.heard.count
        for name, (known, _) in self.told.items():
            for number, line in heir.heard.since(known).items() if name != heir.name else ():
                self._send(self.agents[name], _TO, self.agents[name].heard.take, number, line)
                if not self.reach():
                    return

    def _replay(self, name: str, term: int) -> None:
        """Lets the coordinator hear what has come from a host before it took over."""
        if term != self.term or name not in self.early:
            return
        for what in self.early.pop(name):
            if name not in self.known_lost:
                self.handle(what)


def _code(agent: HostAgent, number: int) -> tuple[int, ...]:
    return (agent.ended[number],) if number in agent.ended else ()

"""The judge of a history on several hosts: also of results, of verdicts on hosts, and of words that come once only.

Rules:
- A commit has one content, whoever tells it, and the results of each host are those of the run without faults.
- The loss of a host is one verdict; another host that coordinates makes one epoch, which is empty.
- A word that comes once only is known at the next commits.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from engine.core.history.run_records import CommitRecord, StampedRecord
from engine.core.manifest import joined_buffers
from engine.core.message_kinds import ToAgent, ToWorker
from engine.core.messages import CommitMessage, NoticeMessage, WaitingMessage
from engine.core.ownership import Grid
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import Takeover
from engine.core.protocol.inputs_outputs import CoordinatorInput
from engine.core.protocol.state import Phase, State
from engine.runtime.agent.run_state import RunState
from tests.simulation.case import Fault, Violation
from tests.simulation.judge import Judge
from tests.simulation.replica import hashed

if TYPE_CHECKING:
    from tests.simulation.executor import Executor
    from tests.simulation.host_world import HostWorld


_LONG_NS = 500_000_000


class HostJudge(Judge):
    """The judge of one history on several hosts."""

    world: HostWorld

    def __init__(self, world: HostWorld, grid: Grid):
        super().__init__(world, grid)
        self.early_end = ""
        self.lost: dict[str, str] = {}  # each host that is lost, and how
        self.commits: dict[int, tuple[float, float, float]] = {}  # as recorded
        self.factors: dict[int, float] = {}  # of clipping, as workers are told
        self.verdicts: defaultdict[str, set[int]] = defaultdict(set)  # epochs, by host
        self.take_overs = self.epochs_of_them = 0
        self.once: dict[tuple[int, type[ToAgent]], int] = {}  # words that come once only, and when
        self.singly: set[int] = set()  # workers that were struck without their host
        self.lost_since_commit = False  # a host

    def may_end_early(self, why: str) -> None:
        """Notes why the run ends before its last step."""
        if "before training" in why and not self.outcomes and not self.world.coordinator.state.started:
            self.world.turns.add("host that coordinates is lost before training")
        elif self.outcomes and why != "no host is left":
            raise Violation(f"the run ends, and step {len(self.outcomes) - 1} is committed: {why}")
        self.early_end = why
        self.world.turns.add(f"the run ends early: {why}")

    def guilty(self, worker: Executor, fault: Fault) -> None:
        """Notes a fault of a worker, for which it may be excluded without its host."""
        super().guilty(worker, fault)
        self.singly.add(worker.number)

    def host_lost(self, name: str, kind: str) -> None:
        """Notes the loss of a host, for which its workers may be excluded."""
        self.lost[name] = kind
        self.lost_since_commit = True
        self.struck |= {number for number, there in self.world.host_of.items() if there == name}
        if kind == "silent":
            self.clock_may_rule = True

    def said(self, number: int, message: ToAgent) -> None:
        """Notes that the agent of a worker has heard a word that comes once only."""
        if isinstance(message, WaitingMessage | NoticeMessage):
            self.once.setdefault((number, type(message)), self.world.now)

    def taken_over(self) -> None:
        """Notes that another host coordinates from now on."""
        self.take_overs += 1

    def recorded(self, record: StampedRecord) -> None:
        """Checks a decision that is recorded."""
        if isinstance(record, CommitRecord):
            told = (record.loss, record.grad_norm, record.clip_factor)
            if self.commits.setdefault(record.step, told) != told:
                raise Violation(f"step {record.step} is told with two losses: {self.commits[record.step]} and {told}")
            if record.loss != self.reference.losses[record.step]:
                raise Violation(f"step {record.step} is told with another loss than that of the run without faults")

    def told(self, message: ToWorker) -> None:
        """Checks a message of a coordinator."""
        super().told(message)
        commit = message if isinstance(message, CommitMessage) else getattr(message, "commit", None)
        if isinstance(commit, CommitMessage):
            factor = self.factors.setdefault(commit.step, commit.clip_factor)
            if factor != commit.clip_factor or factor != self.reference.clips[commit.step]:
                raise Violation(f"step {commit.step} is told with the clip factor {commit.clip_factor}")

    def decided(self, old: CoordinatorState, new: CoordinatorState, given: CoordinatorInput) -> None:
        """Checks a decision that has been written."""
        super().decided(old, new, given)
        if new.commit is not old.commit:
            self.lost_since_commit = False
            self._check_words(new.membership)
        if new.membership.epoch == old.membership.epoch:
            return
        verdict = new.membership.verdict
        if isinstance(given, Takeover):
            self.epochs_of_them += 1
            if {self.world.host_of[out.worker] for out in verdict if out.is_loss} - {given.lost}:
                raise Violation(f"the epoch of a take-over from host {given.lost} has the verdict {verdict}")
            if given.lost in {self.world.host_of[worker] for worker in new.membership.members}:
                raise Violation(f"after the take-over from host {given.lost} its workers are members")
        for host in {self.world.host_of[out.worker] for out in verdict if out.worker not in self.singly}:
            if host in self.lost:
                self.verdicts[host].add(new.membership.epoch)
            if len(self.verdicts[host]) > 1:
                raise Violation(
                    f"the loss of host {host} is {len(self.verdicts[host])} verdicts: {self.verdicts[host]}"
                )

    def end(self) -> None:
        """Checks the end of the history, and the results of each host."""
        if self.early_end or (self.lost and not self.outcomes and not self.world.coordinator.state.started):
            return
        super().end()
        state = self.world.membership
        if state.phase is Phase.HALTED:
            return
        is_whole = not state.lost_stages and bool(state.members) and len(state.done) == len(state.members)
        is_whole = is_whole and not self.lost_since_commit
        self.world.results.close_book()
        self._check_results(self.world.before, self.world.results, is_whole)
        for name, agent in self.world.agents.items():
            if agent.serves:
                self._check_losses(name, agent.heard.results)

    def _check_words(self, state: State) -> None:
        """Checks at a commit that no word is lost that came long before, of a worker that is there."""
        for (number, kind), at_ns in self.once.items():
            known = {*state.members, *state.waiting} if kind is WaitingMessage else {*state.leaving}
            is_there = self.world.workers[number].alive and self.world.host_of[number] not in self.lost
            if is_there and self.world.now - at_ns > _LONG_NS and number not in known.union(state.out, state.lost):
                raise Violation(f"a word of worker {number} is lost: {kind.__name__}")

    def _check_losses(self, name: str, results: RunState) -> None:
        reference = self.reference.losses[: len(results.losses)]
        if tuple(results.losses) != reference:
            raise Violation(f"host {name} has other losses: {results.losses}, and {reference} without faults")

    def _check_results(self, name: str, results: RunState, is_whole: bool) -> None:
        """Checks the trajectory; the hashes of the last step may lack (`RunState.missing`).

        They do if not all members have come to the end, or if a host is lost behind it with what it alone has heard.
        """
        self._check_losses(name, results)
        if len(results.losses) != len(self.outcomes):
            raise Violation(f"host {name} has {len(results.losses)} losses of {len(self.outcomes)} steps")
        expected = []
        for step, states in enumerate(self.reference.states[1 : len(self.outcomes) + 1]):
            for stage, (weights, optimizer, buffers) in enumerate(states):
                joined = joined_buffers([hashed(each) for each in buffers])
                expected.append((step, stage, hashed((weights, optimizer)), joined, self.reference.losses[step]))
        found = [(row.step, row.layer, row.state, row.buffers, row.loss) for row in results.rows]
        last = len(self.outcomes) - 1
        if not is_whole and found == [row for row in expected if row[0] < last]:
            return
        if found != expected:
            lacks = sorted({row[0] for row in {*expected} - {*found}})
            raise Violation(f"the trajectory of host {name} lacks steps {lacks}, or has others")

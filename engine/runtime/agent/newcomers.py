"""Newcomers: the workers of this host that are no members. They load code and data, then wait for an epoch with them.

Rules: a newcomer learns the cut of the model and the borders as each worker does, also if it comes later. It is asked
for a sign of life seldom, because nothing waits for it. It hears of the end of the run, and of nothing else. One that
loads for longer than a member may is given up; the time counts from its start, or from the last that it has learnt,
without that in which this process stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from engine.core.history.run_records import PolicyRecord
from engine.core.job.job import Job
from engine.core.message_kinds import ToWorker
from engine.core.messages import PingMessage, StopMessage
from engine.core.protocol.events import MemoryShortage, WantedOwners, unwatched_ns
from engine.core.protocol.rebalancing import MemoryLook, Rebalancing, look_for_memory, wish
from engine.core.protocol.state import State
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder

# Asks the policy of an elastic job at a tick, if that is due, and lets the coordinator decide on its answer.
#
# It tells the coordinator, too, which newcomers have too little memory for a slot.


def ask(
    before: Rebalancing,
    run: RunState,
    state: State,
    recorder: Recorder,
    decide: Callable[[WantedOwners], object],
    *,
    takes_in: bool = False,
) -> Rebalancing:
    """Asks if that is due, and records the answer. Returns what was asked; workers that begin again need a new one."""
    answer = wish(before, run.job, state, now_ns(), run.times, _memory_of(run.job, state), takes_in=takes_in)
    if answer.why:
        owners = answer.wanted.owners if answer.wanted else ()
        recorder.write(PolicyRecord(step=state.committed, why=answer.why, owners=owners))
    if answer.wanted is not None:
        decide(answer.wanted)
    return answer.asked


def look_at_memory(
    last: MemoryLook,
    run: RunState,
    state: State,
    newcomers: Collection[int],
    decide: Callable[[MemoryShortage], object],
) -> MemoryLook:
    """Looks at the memory that newcomers need, if that is due. Returns the look."""
    look, cramped = look_for_memory(last, run.job, state, newcomers, now_ns(), run.times, _memory_of(run.job, state))
    if cramped is not None:
        decide(cramped)
    return look


def _memory_of(job: Job, state: State) -> Callable[[], int | None]:
    """Returns what reads the free memory for a job's workers, if that of this host is theirs."""
    is_known = job.device == "cpu" and len({*state.nodes.values()}) < 2
    return _free_bytes if is_known else lambda: None


def _free_bytes() -> int | None:
    """Returns the bytes of memory of this host that processes can still get."""
    with open("/proc/meminfo") as facts:
        return next((1024 * int(line.split()[1]) for line in facts if line.startswith("MemAvailable:")), None)


PING_EVERY_NS = 3_000_000_000


class Newcomers:
    """Those among the workers of a host; `state` returns the state of the protocol."""

    def __init__(self, members: Mapping[int, WorkerHandle], state: Callable[[], State]):
        self._members, self._state = members, state
        self._place: list[ToWorker] = []
        self._pinged_ns = 0
        self._since_ns: dict[int, int] = {}  # since when each loads
        self._looked_ns = 0
        self._late: set[int] = set()

    def __contains__(self, worker: int) -> bool:
        state = self._state()
        return worker not in state.members and worker not in state.out

    def _all(self) -> list[WorkerHandle]:
        return [member for worker, member in self._members.items() if worker in self]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of those that load or wait, and of those that were lost before they became members."""
        return tuple(member.worker for member in self._all())

    def learn(self, message: ToWorker) -> None:
        """Passes on a message to all members that newcomers need too, and keeps it for later ones."""
        self._place.append(message)
        self._since_ns.clear()
        tell_all(self._all(), message)

    def know(self, messages: Sequence[ToWorker]) -> None:
        """Takes what a host before has passed on."""
        self._place += messages

    def greet(self, member: WorkerHandle) -> None:
        """Tells a worker that has come later all that the others have learnt."""
        for message in self._place:
            tell_all((member,), message)

    def ping(self, now_ns: int) -> None:
        """Asks for a sign of life, if it is time."""
        if now_ns - self._pinged_ns >= PING_EVERY_NS:
            self._pinged_ns = now_ns
            tell_all(self._all(), PingMessage())

    def late(self, now_ns: int, limit_ns: int) -> list[WorkerHandle]:
        """Returns those that have loaded code and data for longer than `limit_ns`, each once."""
        late_ns, self._looked_ns = unwatched_ns(self._looked_ns, now_ns), now_ns
        self._since_ns = {worker: min(now_ns, since_ns + late_ns) for worker, since_ns in self._since_ns.items()}
        loading = [each for each in self._all() if each.state == "starting" and each.worker not in self._late]
        late = [each for each in loading if now_ns - self._since_ns.setdefault(each.worker, now_ns) > limit_ns]
        self._late.update(each.worker for each in late)
        return late

    def stop(self) -> None:
        """Ends all newcomers; the coordinator knows only those that wait already."""
        tell_all(self._all(), StopMessage())

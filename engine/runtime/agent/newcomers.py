"""Newcomers: the workers of this host that are no members. They load code and data, then wait for an epoch with them.

Rules: a newcomer learns the cut of the model and the borders as each worker does, also if it comes later. It is asked
for a sign of life seldom, because nothing waits for it. It hears of the end of the run, and of nothing else. One that
loads for longer than a member may is given up; the time counts from its start, or from the last that it has learnt,
without that in which this process stood still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.core.membership.evidence import unwatched_ns
from engine.core.membership.state import State
from engine.core.message_codec import ToWorker
from engine.core.messages import BorderMessage, PartitionMessage
from engine.core.process_messages import PingMessage, StopMessage
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all

PING_EVERY_NS = 2_000_000_000


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
        known = self._state()
        return worker not in known.members and worker not in known.out

    def _all(self) -> list[WorkerHandle]:
        return [member for worker, member in self._members.items() if worker in self]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of those that load or wait, and of those that were lost before they became members."""
        return tuple(member.worker for member in self._all())

    def learn(self, message: ToWorker) -> None:
        """Passes on a message to all members that newcomers need too, and keeps it for later ones."""
        if isinstance(message, PartitionMessage | BorderMessage):
            self._place.append(message)
            self._since_ns.clear()
            tell_all(self._all(), message)

    def know(self, told: Sequence[ToWorker]) -> None:
        """Takes what a host before has passed on."""
        self._place += told

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

"""A run that another host has coordinated, as the agent of the next one takes it over: its workers go on.

    the host before ends    the store has the state, each host has its processes, this host has heard the results
    this agent              gets a handle for each process, lets the coordinator take over, and hears again what the
                            workers have said that the host before may not have handled

Rule: a member without a process counts as ended, with its host if that is lost. So the loss of a host is one verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.core.checkpoints.resumption import Resumption
from engine.core.membership.events import TakenOver
from engine.core.store.kv import Lease
from engine.files.run_folder import RunFolder
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.start_up import Crew, Guard, Launch
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, give_slots
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.process.fork_client import Child

if TYPE_CHECKING:
    from engine.runtime.agent.agent import Agent


class HeldProcess(NamedTuple):
    """The process of a worker of a host; `adopt` makes a handle with the far end of a link and a progress board."""

    worker: int
    host: str
    adopt: Callable[[int, int], Child]


class TakenRun(NamedTuple):
    """A run to go on with, in the folder of this host; `hear_again` lets the words come that were said before."""

    folder: RunFolder
    results: RunState
    processes: Sequence[HeldProcess]
    hear_again: Callable[[], None]


class Seat(NamedTuple):
    """What a host that coordinates has beside its servers: a lease that a thread keeps, and a run to go on with."""

    lease: Lease | None = None
    taken: TakenRun | None = None


NO_SEAT = Seat()


def taken_crew(launch: Launch, taken: TakenRun, origin: Resumption | None) -> Crew:
    """Returns the handles of all processes of a run that is taken over."""
    workers = [each.worker for each in taken.processes]
    board = ProgressBoard.create(max(workers, default=0) + 1)
    launch.stack.callback(board.close)
    members: dict[int, WorkerHandle] = {}
    launch.stack.callback(close_workers, members)
    launch.numbers.update(workers)
    for each in taken.processes:
        link, far = Link.pair(blocking=False)
        child = each.adopt(far.fileno(), board.fd)
        far.close()
        log = launch.logs / f"worker-{each.worker}.log"
        members[each.worker] = WorkerHandle(each.worker, (), child, link, log, "running", host=each.host)
    return Crew(launch, board, Guard(), (), origin, members)


def take_over(agent: Agent, taken: TakenRun) -> None:
    """Lets the coordinator of an agent go on with the run: an epoch begins, in which all say again what they hold."""
    give_slots(agent.members.values(), agent.node.coordination.ownership)
    agent.decide(TakenOver(now_ns()))
    taken.hear_again()

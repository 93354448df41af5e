"""A run that another host has coordinated, as the agent of the next one takes it over: its workers go on.

    the host before ends    the store has the state, each host has its processes, this host has heard the results
    this agent              gets a handle for each process, lets the coordinator take over, and hears again what the
                            workers have said that the host before may not have handled

Rule: a member without a process counts as ended, with its host if that is lost. So the loss of a host is one verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.core.faults.taken_faults import ToldFaults
from engine.core.message_codec import ToWorker
from engine.core.messages import WelcomeMessage
from engine.core.store.kv import Lease
from engine.files.run_folder import RunFolder
from engine.runtime.agent.run_state import RunState
from engine.runtime.keeping.scribe import Scribe
from engine.runtime.process.fork_client import Child


class HeldProcess(NamedTuple):
    """The process of a worker of a host; `adopt` makes a handle with the far end of a link and a progress board."""

    worker: int
    host: str
    adopt: Callable[[int, int], Child]


class TakenRun(NamedTuple):
    """A run to go on with; `hear_again` lets the words come that were said before.

    `home` is the folder in which the run began: its workers keep checkpoints there, if the job names no other place,
    and these have its name. `faults` are those of which this host has heard; `lost` is the host before. `welcomes` by
    worker, and `place`, were told to the workers; `last` is their greatest number. This host has had so many `notices`.
    """

    home: Path
    results: RunState
    processes: Sequence[HeldProcess]
    hear_again: Callable[[], None]
    faults: ToldFaults
    lost: str
    welcomes: Mapping[int, WelcomeMessage]
    place: Sequence[ToWorker]
    last: int
    notices: int


class Seat(NamedTuple):
    """What a session has beside its servers: its scribe; on a host of several a lease and a run to go on with.

    A thread keeps the lease. The `folder` is there if this host has served another one before. Without a run all
    workers begin again. Without a scribe this process waits for the disk itself.
    """

    lease: Lease | None = None
    folder: RunFolder | None = None
    taken: TakenRun | None = None
    scribe: Scribe | None = None


NO_SEAT = Seat()


class HandedOverError(Exception):
    """All workers of this host have left after a notice, and the run goes on: another host coordinates it."""

"""The start of the workers of a run: their processes, the guard of their transfers, and their first messages."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from engine.core.config.job import Job
from engine.core.faults.fault import Fault, to_plain
from engine.core.history.process_records import PairsRecord, StartedRecord
from engine.core.messages import WelcomeMessage
from engine.core.ownership import Ownership
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, start_workers
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.network_namespace import new_network


class Guard(NamedTuple):
    """The guard of the transfers between workers: the descriptor of a namespace, or a key."""

    fds: tuple[int, ...] = ()
    key: str = ""


def fork_workers(
    stack: contextlib.ExitStack,
    server: ForkServer,
    ownership: Ownership,
    recorder: Recorder,
    record_fds: tuple[int, int],
    logs: Path,
) -> tuple[ProgressBoard, dict[int, WorkerHandle], Guard]:
    """Starts the workers; `stack` ends them."""
    board = ProgressBoard.create(max(ownership.workers()) + 1)
    stack.callback(board.close)
    guard = _guard(stack, recorder)
    members = start_workers(server, ownership, record_fds, board, logs, guard.fds)
    stack.callback(close_workers, list(members.values()))
    return board, members, guard


def _guard(stack: contextlib.ExitStack, recorder: Recorder) -> Guard:
    """Returns the guard of this run's transfers: a network namespace where the kernel makes one, else a key."""
    try:
        network = new_network()
    except OSError as error:
        recorder.write(PairsRecord(guard="proof", why=str(error)))
        return Guard(key=secrets.token_hex(32))
    stack.callback(os.close, network)
    recorder.write(PairsRecord(guard="namespace", why=""))
    return Guard((network,))


def welcome(
    members: Mapping[int, WorkerHandle],
    recorder: Recorder,
    job: Job,
    ownership: Ownership,
    ranks: tuple[int, ...],
    faults: Sequence[Fault],
    guard: Guard,
) -> None:
    """Sends each worker its first message."""
    for member in members.values():
        recorder.write(StartedRecord(of=member.worker, child=member.child.pid, slots=member.slots))
        message = WelcomeMessage(
            worker=member.worker,
            job=asdict(job),
            owners=ownership.owners,
            shadows=ownership.shadows,
            ranks=ranks,
            num_lines=max(ownership.workers()) + 1,
            faults=tuple(to_plain(fault) for fault in faults),
            pair_key=guard.key,
        )
        member.link.send(message)

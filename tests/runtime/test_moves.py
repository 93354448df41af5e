"""Slots move at step boundaries to the owners that are wanted: the same bits, no backward twice, few bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from engine.core.checks.trajectory import trajectory_hash
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord, FinishedRecord, MovedRecord
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.protocol.events import WantedOwners
from engine.files.events_file import read_history
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.run_state import Ending
from engine.runtime.agent.session import run_session
from engine.runtime.process.clock import now_ns
from engine.runtime.process.thread_server import ThreadServer
from tests.kills import parse_kills
from tests.runtime.small_jobs import WIDTH, Block
from tests.runtime.thread_runs import with_store_double

THIRDS = (0,) * 4 + (1,) * 4 + (2,) * 4
HALVES = (0,) * 6 + (2,) * 6
_HEADER = 2500  # bytes of a heal that describe its tensors
JOB = Job(
    model="tests.runtime.test_moves:deep",
    data="synthetic",
    stages=12,
    workers=3,
    microbatches=2,
    steps=15,
    check_pure=False,
)


def deep() -> list[nn.Module]:
    """Makes a model of twelve layers, most of them with buffers and random numbers."""
    return [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(10)), nn.Linear(WIDTH, 1)]


@contextmanager
def wanting(wishes: Mapping[int, tuple[int, ...]]) -> Iterator[None]:
    """Tells the coordinator the wanted owners of all slots when a step is committed."""
    decide, left = Agent.decide, dict(wishes)

    def telling(self: Agent, given: Any) -> Any:
        found = decide(self, given)
        if (owners := left.pop(self.node.state.committed, None)) is not None:
            decide(self, WantedOwners(now_ns(), owners, "a test"))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "decide", telling)
        yield


def run(
    job: Job, folder: Path, wishes: Mapping[int, tuple[int, ...]], kills: tuple[str, ...] = ()
) -> tuple[Ending, RunHistory]:
    """Returns the end and the records of a job in which these owners are wanted."""
    folder.mkdir()
    with ThreadServer() as server, with_store_double(), wanting(wishes):
        ending = run_session(job, folder / "events.jsonl", folder, server=server, faults=parse_kills(kills, job))
    assert (ending.outcome, ending.error) == ("finished", None)
    return ending, read_history(folder / "events.jsonl")


def bits(ending: Ending) -> str:
    """Returns the hash of the trajectory of a run."""
    return trajectory_hash(ending.view.run_state.rows)


def moved(history: RunHistory) -> list[tuple[int, ...]]:
    """Returns the owners of each epoch that began at a step boundary."""
    return [each.owners for each in history.of(EpochRecord) if each.planned]


def healed(history: RunHistory) -> list[int]:
    """Returns the bytes that were sent to new shadows in each step with some, by all workers."""
    found: Counter[int] = Counter()
    for each in history.of(MovedRecord):
        found[each.step] += each.bytes if each.program == "heal" else 0
    return [number for _, number in sorted(found.items()) if number]


def least(history: RunHistory, slots: Sequence[int]) -> int:
    """Returns the bytes of the state of some slots: weights, optimizer and buffers."""
    sizes = {stage: StageBytes(*rest) for done in history.of(FinishedRecord) for stage, *rest in done.sizes}
    return sum(sizes[slot].weights + sizes[slot].optimizer + sizes[slot].buffers for slot in slots)


def test_slots_move_to_any_worker_and_merged_ones_to_both_neighbours(tmp_path: Path) -> None:
    still, _ = run(JOB, tmp_path / "still", {})
    near, turned = (0,) * 5 + (1,) * 2 + (2,) * 5, (*THIRDS[4:], *THIRDS[:4])
    ending, history = run(JOB, tmp_path / "moved", {1: near, 3: turned, 11: HALVES}, kills=("9:0",))
    assert trajectory_hash(ending.view.run_state.rows) == trajectory_hash(still.view.run_state.rows)
    epochs = [(each.planned, each.owners) for each in history.of(EpochRecord)][1:]
    merged = (2, 0, 2, 0, *turned[4:])
    # First the workers learn where replicas are missing; when the last one is whole, all slots move.
    wanted = [(True, near), (True, near), (True, turned), (False, merged), (True, HALVES)]
    assert epochs == wanted
    missing = (0, 2, 4, 5, 6, 8, 9, 11)
    assert 0 < healed(history)[0] <= 1.05 * least(history, missing) + _HEADER * len(missing)


@pytest.mark.soak
def test_an_elastic_job_shares_out_the_blocks_of_a_dead_worker(tmp_path: Path) -> None:
    job = replace(JOB, stages=4, blocks=3, workers=0, microbatches=8, elastic=True, steps=30)
    still, _ = run(replace(job, elastic=False), tmp_path / "still", {})
    ending, history = run(job, tmp_path / "elastic", {}, kills=("2:4",))
    assert trajectory_hash(ending.view.run_state.rows) == trajectory_hash(still.view.run_state.rows)
    last = [*history.of(EpochRecord)][-1]
    assert last.planned
    assert sorted(Counter(last.owners).values()) == [4, 4, 4]
    assert len([*groupby(last.owners)]) == 3, "each worker has one run of blocks"

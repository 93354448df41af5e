"""A run in small: executors in processes of their own over a real data plane, and a test in the place of the agent.

The test says who owns and shadows what, counts the votes, and decides who dies where. Nothing else of a run is here.
"""

from __future__ import annotations

import os
import select
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.action import Action
from engine.core.config.job import Job
from engine.core.errors import TransferFailedError
from engine.core.message_codec import Message, ToWorker
from engine.core.messages import CommitMessage, EpochMessage, InventoryMessage, VoteMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.build import build_program
from engine.core.recovery.ballot import open_ballot
from engine.core.recovery.inventory import from_json, to_json
from engine.core.recovery.planner import PlanInput, make_plan
from engine.models.data import Data
from engine.models.layers import Model
from engine.models.model_loader import build_model, open_data
from engine.runtime.ipc.control import Control, Fenced
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.ipc.step_writer import StepWriter
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import hash_tensors
from engine.runtime.stage.tied import tied_stages
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transport import Transport
from engine.runtime.transport.worker_program import worker_program
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.worker_context import WorkerContext
from tests.runtime.peer_messages import Report, SmallPlan, an_epoch
from tests.runtime.peers import PeerServer, backend_of

WIDTH = 32  # of the synthetic vectors
_TIMEOUT_S = 30.0


class Block(nn.Module):
    """Normalises, multiplies and drops: random numbers, buffers and a residual connection in one layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(self.norm(x)), 0.3, self.training)


def normed() -> list[nn.Module]:
    """Makes a model whose layers have buffers."""
    return [nn.Linear(WIDTH, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 1)]


class Turned(nn.Module):
    """Like spectral normalisation: what it returns depends on a buffer that every forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.ones(WIDTH))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        if self.seen[0] > self.seen[1]:  # so that a parameter has a gradient, or not, after some microbatches
            x = x + self.sometimes(x)
        return self.block(x) * self.seen


def stateful() -> list[nn.Module]:
    """Makes a model whose forwards depend on all that were before."""
    return [nn.Linear(WIDTH, WIDTH), Turned(), Turned(), Turned(), nn.Linear(WIDTH, 1)]


NORMED = {"model": "tests.runtime.small_run:normed", "data": "synthetic", "microbatch_size": 4}
STATEFUL = NORMED | {"model": "tests.runtime.small_run:stateful"}
ALL_KINDS = NORMED | {"model": "tests.e2e.state_models:all_kinds"}
TIED_GPT = {"model": "gpt", "model_args": {"width": 16, "depth": 2, "heads": 2, "tied": True}, "microbatch_size": 2}


def small_job(**values: Any) -> Job:
    return Job(**{"stages": 3, "microbatches": 4, "steps": 6, "warmup_steps": 0, "clip_norm": 0.05, **values})


def starts_of(job: Job, model: Model) -> tuple[int, ...]:
    return tuple(len(model.layers) * stage // job.stages for stage in range(job.stages))


def borders_of(job: Job, model: Model, data: Data) -> tuple[Border, ...]:
    starts = starts_of(job, model)
    inputs, borders = data.microbatch(0, 0, 0, job.microbatch_size).inputs, []
    for first, last in zip(starts, (*starts[1:], len(model.layers)), strict=True):
        borders.append(Stage(job, model, 0, first, last).probe(inputs))
        inputs = tuple(spec.zeros() for spec in borders[-1])
    return tuple(borders)


class Doom:
    """Ends this process at one moment of its life."""

    def __init__(self, kill: Sequence[Any]):
        self.moment = tuple(kill)
        self.armed = bool(kill)

    def at(self, step: int, action: Action, when: str) -> None:
        if (step, str(action), when) == self.moment:
            os._exit(1)

    def delay(self, step: int, action: Action, start_ns: int) -> None:
        """Holds no action."""


class Forwards(Control):
    """A control whose position never goes back, also in a recovery: the failure detector would ignore it."""

    _at = (0, 0, False)

    def next_epoch(self) -> EpochMessage:
        """Waits for an epoch, and enters it."""
        while True:
            heard = self.hear()
            if isinstance(heard, EpochMessage):
                self.accepted = heard.epoch
                return heard

    @property
    def at(self) -> tuple[int, int, bool]:
        """The position in the heartbeats."""
        return self._at

    @at.setter
    def at(self, at: tuple[int, int, bool]) -> None:
        assert at[:2] >= self._at[:2], f"from {self._at} back to {at}"
        self._at = at


def works(control_fd: int, prefix: str, worker: int, values: dict[str, Any], kill: list[Any]) -> None:
    """Is a worker: enters each epoch that it is told of, and runs until it is told to report."""
    control = Forwards(Link.from_fd(control_fd))
    torch.set_num_threads(1)
    job = Job(**values)
    data = open_data(job)
    model = build_model(job, data.facts)
    starts = starts_of(job, model)
    grid = Grid(job.stages, job.microbatches, job.pipelines, tied_stages(model.ties, starts))
    replicas, plane, executor = None, None, None
    backend = backend_of(prefix, control, worker)
    doom: Any = Doom(kill)
    while True:
        epoch = control.next_epoch()
        if executor is not None:
            control.send(InventoryMessage(control.accepted, to_json(executor.inventory()), ()))
        try:
            told = control.take(SmallPlan)
        except Fenced:  # somebody else has died meanwhile
            continue
        ownership = Ownership(grid, told.owners, told.shadows)
        if epoch.regroup:
            if plane is not None:
                plane.abandon()
            plane = backend.joining(epoch.epoch, epoch.members).join()
        if replicas is None or executor is None:
            replicas = Replicas(job, model, starts, ownership.held_by(worker))
            borders = borders_of(job, model, data)
            replicas.learn(borders)
            board, recorder = ProgressBoard.create(worker + 1), _recorder(worker)
            context = WorkerContext(
                job, worker, starts, borders, replicas, data, control, recorder, board, doom, backend
            )
            executor = Executor(context)
        catch_up(executor, told.commit)
        if told.inventories is None:
            healing = frozenset((each, (d, s)) for each, d, s in told.healing)
            program = build_program(job.schedule, ownership, job.redundancy, healing, job.log_every)
        else:
            inventories = tuple(from_json(text) for text in told.inventories)
            plan = make_plan(PlanInput(epoch.epoch, told.committed, ownership, inventories))
            assert plan.lost_stages == ()
            program = plan.program
            for slot in plan.adopted:
                if ownership.owner(*slot) == worker:
                    replicas.adopt(slot)
        assert plane is not None
        executor.enter(plane, worker_program(worker, program, ownership, executor.context.borders))
        try:
            run_to_end(executor, control, plane)
            control.send(Report(tuple((*slot, *_hashes(replicas.stages[slot])) for slot in replicas.whole())))
        except (Fenced, TransferFailedError):
            pass  # the test hears of a death by itself


def catch_up(executor: Executor, commit: CommitMessage | None) -> None:
    if commit is not None and commit.step == executor.step:
        executor.catch_up(commit)


def run_to_end(executor: Executor, control: Control, plane: Transport) -> None:
    then = ""
    while then != "end":
        executor.run_actions()
        commit = control.take(CommitMessage)
        executor.take_step(commit)
        plane.release_sent()
        then = commit.then


def _hashes(stage: Stage) -> tuple[str, str, str]:
    """Returns what must be equal over runs: weights and optimizer state, buffers, buffers of all pipelines."""
    weights = [each for optimizer in stage.optimizers.values() for each in optimizer.state_tensors()]
    buffers = [("", buffer) for buffer in stage.buffers()]
    boundary = [("", buffer) for buffers in stage.boundary for buffer in buffers]
    assert stage.residuals == {} and stage.losses == {} and stage.counted == stage.added == 0
    return hash_tensors(weights), hash_tensors(buffers), hash_tensors(boundary)


Rows = dict[int, dict[Slot, list[str]]]  # by worker and slot


class SmallRun:
    """The test's side; closes with its peers. `dead` are those that ended, in order."""

    num_runs = 0

    def __init__(self, peers: PeerServer, job: Job, ownership: Ownership, kills: Mapping[int, Any] = {}):
        SmallRun.num_runs += 1
        model = build_model(job, open_data(job).facts)
        grid = Grid(job.stages, job.microbatches, job.pipelines, tied_stages(model.ties, starts_of(job, model)))
        self.ownership = replace(ownership, grid=grid)
        self.job = job
        self.epoch = 0
        self.step = 0
        self.commits: list[CommitMessage] = []
        self.dead: list[int] = []
        self.links: dict[int, Link] = {}
        for worker in self.ownership.workers():
            self.links[worker], far = Link.pair()
            arguments = (f"small-{SmallRun.num_runs}", worker, asdict(job), list(kills.get(worker, ())))
            peers.start(works, *arguments, fds=[far.fileno()])
            far.close()
        self._tell_epoch(regroup=True)
        self._tell_plan(None, ())

    def _tell_all(self, message: ToWorker) -> None:
        for link in self.links.values():
            link.send(message)

    def _tell_epoch(self, regroup: bool) -> None:
        self.epoch += 1
        self._tell_all(an_epoch(self.epoch, tuple(sorted(self.links)), regroup=regroup))

    def _tell_plan(self, inventories: tuple[str, ...] | None, healing: Collection[tuple[int, Slot]]) -> None:
        self.ballot = open_ballot(self.epoch, self.step, self.ownership, self.job.clip_norm)
        plan = SmallPlan(
            owners=self.ownership.owners,
            shadows=self.ownership.shadows,
            healing=tuple((worker, *slot) for worker, slot in sorted(healing)),
            committed=self.step - 1,
            commit=self.commits[-1] if self.commits else None,
            inventories=inventories,
        )
        self._tell_all(plan)

    def _hear(self) -> tuple[int, Message | None]:
        poll = select.poll()  # which takes descriptors of any number
        for link in self.links.values():
            poll.register(link, select.POLLIN)
        ready = dict(poll.poll(_TIMEOUT_S * 1000))
        assert ready, f"nothing is heard at step {self.step}, epoch {self.epoch}; votes missing: {self.ballot.missing}"
        worker = next(each for each, link in self.links.items() if link.fileno() in ready)
        return worker, self.links[worker].receive()

    def run(self, num_steps: int) -> Rows | None:
        """Runs steps, then returns what everybody holds; None as soon as somebody has died."""
        until = self.step + num_steps
        rows: Rows = {}
        while len(rows) < len(self.links):
            worker, message = self._hear()
            if message is None:
                self._bury(worker)
                return None
            if isinstance(message, VoteMessage):
                self._count(worker, message, until)
            elif isinstance(message, Report):
                rows[worker] = {(row[0], row[1]): list(row[2:]) for row in message.rows}
        return rows

    def _count(self, worker: int, vote: VoteMessage, until: int) -> None:
        self.ballot, commit = self.ballot.add(worker, vote)
        if commit is not None:
            self.step += 1
            self.commits.append(CommitMessage(commit.step, commit.clip_factor, "end" if self.step == until else "step"))
            self._tell_all(self.commits[-1])
            self.ballot = open_ballot(self.epoch, self.step, self.ownership, self.job.clip_norm)

    def _bury(self, worker: int) -> None:
        self.links.pop(worker).close()
        self.dead.append(worker)
        assert self.links, f"everybody has died: {self.dead}"

    def go_on(self, ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> None:
        """Begins an epoch at a step boundary, on the same plane."""
        self._tell_epoch(regroup=False)
        self._gather()
        self.ownership = replace(ownership, grid=self.ownership.grid)
        self._tell_plan(None, healing)

    def recover(self, ownership: Ownership) -> bool:
        """Begins an epoch without the dead; says whether all others were still there to answer."""
        self._tell_epoch(regroup=True)
        inventories = self._gather()
        if inventories is None:
            return False
        self.ownership = replace(ownership, grid=self.ownership.grid)
        self._tell_plan(inventories, ())
        return True

    def _gather(self) -> tuple[str, ...] | None:
        found: dict[int, str] = {}
        while len(found) < len(self.links):
            worker, message = self._hear()
            if message is None:
                self._bury(worker)
                return None
            if isinstance(message, InventoryMessage):
                found[worker] = message.holds
        return tuple(found[worker] for worker in sorted(found))

    def close(self) -> None:
        """Lets every peer end."""
        for link in self.links.values():
            link.close()


class _NoSteps(StepWriter):
    def append(self, step: int, data: bytes) -> None:
        """Writes nothing."""


def _recorder(worker: int) -> Recorder:
    return Recorder(os.open(os.devnull, os.O_WRONLY), worker, _NoSteps(-1, worker, 1))

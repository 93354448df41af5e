"""One worker of the pipeline benchmark: our executor and torch's schedule run in turns on the same layers.

The sides share the process, its threads, the modules and the microbatches. Each accumulates gradients as in a training
step. The time to drop the gradients and the sent tensors is not measured. All workers start an iteration at one agreed
moment, so that no time of a barrier is measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import distributed

from engine.bench.figures import SIDES, CodecTimes, Stamps, Turns, in_turns, timed_program
from engine.core.action import Op, Program
from engine.core.checks.determinism import settings_of
from engine.core.errors import required
from engine.core.job.job import Job
from engine.core.messages import ByeMessage, FinishedMessage, WelcomeMessage
from engine.core.program.schedules import SCHEDULES
from engine.models import networks as timed
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.layers import Batch
from engine.runtime.device.device import open_device, set_up
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control
from engine.runtime.process.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.transport.transfers import worker_program
from engine.runtime.worker.executor import Call, Executor, Handler, register
from engine.runtime.worker.step_end import WorkerContext
from engine.runtime.worker.worker import GroupMember, WorkerRun, direct_backend

_LEAD_NS = 5_000_000  # between the agreement on a start and the start
_NUM_WARM_UP = 2


class Side(Protocol):
    """One of the two executors that take turns."""

    def run(self) -> None:
        """Runs forwards and backwards of all microbatches."""

    def tidy(self) -> None:
        """Cleans up after an iteration; this time is not measured."""


class PremadeData:
    """Microbatches made in advance, so that the time to make them is not measured."""

    def __init__(self, data: Data, num_microbatches: int, size: int):
        self.facts = data.facts
        self.batches = [data.microbatch(0, 0, index, size) for index in range(num_microbatches)]

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the same microbatch at every step."""
        return self.batches[microbatch]

    def validation(self, index: int, size: int) -> Batch:
        """Returns training samples, because the benchmark does not validate."""
        return self.batches[index]


class OurSide:
    """Our executor and data plane, with the events, progress board and control thread of a run."""

    def __init__(self, joined: GroupMember, program: Program):
        context, ownership, self.plane = joined.context, joined.ownership, required(joined.plane, "it has joined")
        self.executor = Executor(context)
        self.executor.enter(self.plane, worker_program(context.worker, program, ownership, context.borders))

    def run(self) -> None:
        """Runs the program once."""
        self.executor.run_actions()

    def tidy(self) -> None:
        """Drops the tensors that were sent, and the state of the step."""
        self.plane.release_sent()
        self.executor.forget_step()


def main(control_fd: int, events_fd: int, steps_fd: int, board_fd: int) -> int:
    """Runs one worker of one case over the file descriptors from the launcher; returns its exit code."""
    sleep_exactly()
    worker = WorkerRun((events_fd, steps_fd), board_fd)
    control = Control(Link.from_fd(control_fd), worker)
    turns, welcome = control.take(Turns), control.take(WelcomeMessage)
    set_up(settings_of(job := Job(**welcome.job)))
    device = open_device(job.device, welcome.worker, shares=job.share_gpu)
    backend = direct_backend(control, welcome, device)
    joined = worker.join(control, welcome, backend, device, _premade)
    context = joined.context
    # The import takes a second, which no other role should spend, and leaves temporary files.
    tempfile.tempdir = turns.temporary
    from engine.bench.torch_side import AgentStore, TorchSide, join_default_group

    join_default_group(AgentStore(control, 0, "torch"), context.worker, len(welcome.ranks), device)
    ownership = joined.ownership
    if kind := SCHEDULES[job.schedule].overlaps:
        register(kind, _at_once())
    sides: tuple[Side, Side] = OurSide(joined, timed_program(job, ownership)), TorchSide(context)
    calls = {name: partial(_run_once, context, side) for name, side in zip(SIDES, sides, strict=True)}
    results = in_turns(calls, _NUM_WARM_UP + turns.iterations)
    for name, stamps in ((name, each) for name, figures in results.items() for each in figures[_NUM_WARM_UP:]):
        control.send(CodecTimes(name, stamps))
    control.send(FinishedMessage(control.accepted, (), 0, ()))
    control.take(ByeMessage)
    return os.EX_OK


def _at_once() -> Handler:
    """Returns a handler that runs a pair of sleeping actions concurrently, the shorter forward in its own thread."""
    pool = ThreadPoolExecutor(1)

    def run(*pair: Call) -> None:
        forward, backward = sorted(pair, key=lambda call: call.action.op is not Op.F)
        other = pool.submit(forward)
        backward()
        other.result()

    return run


def _premade(job: Job) -> PremadeData:
    return PremadeData(open_data(job), job.microbatches, job.microbatch_size)


def _run_once(context: WorkerContext, side: Side) -> Stamps:
    for stage in context.replicas.stages.values():
        for layer in stage.layers.values():
            layer.zero_grad()
    timed.forwards_ns.clear()
    timed.backwards_ns.clear()
    start_ns, start_cpu_ns = _common_start(), time.process_time_ns()
    side.run()
    context.replicas.device.wait()
    end_ns, cpu_ns = now_ns(), time.process_time_ns() - start_cpu_ns
    side.tidy()
    return Stamps(start_ns, end_ns, tuple(timed.forwards_ns), tuple(timed.backwards_ns), cpu_ns)


def _common_start() -> int:
    """Waits for a moment that all workers agree on, shortly after the last of them called this; returns the time."""
    moment = torch.tensor(now_ns() + _LEAD_NS)
    distributed.all_reduce(moment, distributed.ReduceOp.MAX)
    time.sleep(max(0, int(moment) - now_ns()) / 1e9)
    return now_ns()

"""One worker's life: join, learn what it owns and shadows, build its stages, train, leave.

A worker decides nothing. The agent tells it the job, the partition, the borders between stages, each epoch, plan and
commit, and the end; whatever goes wrong here is told to the agent, who decides what comes of it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.core import messages
from engine.core.config.job import Job
from engine.core.config.partition import partition
from engine.core.errors import BambooError, ExitCode, UserError
from engine.core.faults.fault import from_plain
from engine.core.messages import (
    CutMessage,
    FailedMessage,
    PartitionMessage,
    RaisedMessage,
    ReadyMessage,
    RefusedMessage,
    WelcomeMessage,
)
from engine.core.ownership import Grid, Ownership, Slot
from engine.models.data import Data
from engine.models.layers import Model
from engine.models.model_loader import build_model, open_data
from engine.runtime.ipc.control import Control, Stopped
from engine.runtime.ipc.link import Link
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.prctl import die_with_launcher, sleep_exactly
from engine.runtime.replica.replicas import Replicas
from engine.runtime.replica.sharded_stages import ShardedStages
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.tied import tied_stages
from engine.runtime.stage.weigh_layers import weigh_layers
from engine.runtime.transport.data_plane import DataPlane
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.tensor_spec import Border, TensorSpec
from engine.runtime.worker.failpoints import Failpoints
from engine.runtime.worker.pure_check import check_pure
from engine.runtime.worker.training import Out, Training
from engine.runtime.worker.worker_context import WorkerContext

_LINGER_S = 0.05  # to end takes milliseconds of a core, and the others are about to begin a step
_MAX_TRACEBACK = 20_000  # characters that still fit one message


class GroupMember(NamedTuple):
    """What a worker has once it has joined; all but the first changes with the epochs."""

    context: WorkerContext
    ownership: Ownership
    rendezvous: Rendezvous
    plane: DataPlane


def main(control_fd: int, events_fd: int, board_fd: int) -> int:
    """Runs one worker over the descriptors that the agent handed to it; returns its exit code."""
    sleep_exactly()
    control = Control(Link.from_fd(control_fd), die_with_launcher)
    control.give_notice_of_sigterm()
    try:
        _live(control, events_fd, board_fd)
    except Stopped:
        return ExitCode.OK
    except Out:
        time.sleep(_LINGER_S)
        return ExitCode.LEFT_WITH_NOTICE if control.has_given_notice else ExitCode.FENCED
    except UserError as error:
        traceback.print_exc()  # to this worker's log: where in the user's own code it came from
        control.send(RefusedMessage(error.problems))
        return error.exit_code
    except BambooError as error:
        control.send(FailedMessage(str(error), int(error.exit_code)))
        return error.exit_code
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TRACEBACK]
        control.send(RaisedMessage(control.at[0], text, traceback.format_exc()[-_MAX_TRACEBACK:]))
        return ExitCode.NOT_RECOVERED
    return ExitCode.OK


def _live(control: Control, events_fd: int, board_fd: int) -> None:
    welcome = control.take(WelcomeMessage)
    job = Job(**welcome.job)
    torch.set_num_threads(job.threads)
    board = ProgressBoard(board_fd, welcome.num_lines)
    data = open_data(job)
    model = build_model(job, data.facts)
    control.recorder = Recorder(events_fd, welcome.worker)
    joined = join(control, welcome, job, data, model, control.recorder, board)
    if job.check_pure and model.check_pure:
        check_pure(joined.context, joined.ownership)
    training = Training(*joined)
    control.send(ReadyMessage())
    training.run()


def join(
    control: Control,
    welcome: WelcomeMessage,
    job: Job,
    data: Data,
    model: Model,
    recorder: Recorder,
    board: ProgressBoard,
) -> GroupMember:
    """Learns the partition, builds this worker's stages, forms the data plane and learns the borders between stages."""
    worker, owners = welcome.worker, welcome.owners
    if worker == owners[0]:
        control.send(CutMessage(_partition(job, model, data), tuple(each.name for each in model.layers)))
    starts = control.take(PartitionMessage).starts
    grid = Grid(job.stages, job.microbatches, job.pipelines, tied_stages(model.ties, starts))
    ownership = Ownership(grid, owners, welcome.shadows)
    slots = (*ownership.slots_of(worker), *ownership.shadowed_by(worker))
    replicas = Replicas(job, model, starts, slots)
    rendezvous = Rendezvous()
    store = rendezvous.of_epoch(0, welcome.store_port)
    plane = DataPlane(control, store, worker, welcome.ranks)
    owned = {slot: replicas.stages[slot] for slot in ownership.slots_of(worker)}
    borders = _learn_borders(control, job, data, owned)
    replicas.learn(borders)
    failpoints = Failpoints(control, worker, [from_plain(each) for each in welcome.faults], replicas)
    shards = ShardedStages(worker, replicas, ownership, store) if job.fsdp else None
    context = WorkerContext(job, worker, starts, borders, replicas, data, control, recorder, board, failpoints, shards)
    return GroupMember(context, ownership, rendezvous, plane)


def _partition(job: Job, model: Model, data: Data) -> tuple[int, ...]:
    kinds = [layer.kind for layer in model.layers]
    if job.stages > len(kinds) or job.partition not in ("parameters", "profile"):
        return partition(job.partition, job.stages, kinds, ())
    return partition(job.partition, job.stages, kinds, weigh_layers(job, model, data))


def _learn_borders(control: Control, job: Job, data: Data, owned: Mapping[Slot, Stage]) -> tuple[Border, ...]:
    """Pipeline 0 is probed stage by stage; everybody hears every border, so that anyone could take over any stage."""
    borders: list[Border] = []
    for index in range(job.stages):
        if (0, index) in owned:
            inputs = (
                tuple(spec.zeros() for spec in borders[-1])
                if borders
                else data.microbatch(0, 0, 0, job.microbatch_size).inputs
            )
            border = owned[0, index].probe(inputs)
            control.send(messages.BorderMessage(index, tuple(spec.to_json() for spec in border)))
        learned = control.take(messages.BorderMessage)
        assert learned.stage == index
        borders.append(tuple(TensorSpec.from_json(spec) for spec in learned.specs))
    return tuple(borders)

"""One worker's life: join, learn what it owns, build its stages, run steps, leave.

A worker decides nothing. The agent tells it the job, the partition, the borders between stages, each commit and the
end; whatever goes wrong here is told to the agent, who decides what comes of it.
"""

from __future__ import annotations

import contextlib
import traceback

import torch

from engine.core.errors import BambooError, ExitCode, UserError, WorkerFailedError
from engine.core.job import Job
from engine.core.ownership import Grid, Ownership
from engine.core.partition import partition
from engine.core.program import build_program
from engine.models.catalogue import build_model, open_data
from engine.models.data import Data
from engine.models.layers import Model
from engine.runtime.control import Control, Stopped
from engine.runtime.executor import Executor, Surroundings
from engine.runtime.kernel import sleep_exactly
from engine.runtime.link import Link, Message
from engine.runtime.plane import DataPlane
from engine.runtime.progress_board import ProgressBoard
from engine.runtime.recorder import Recorder
from engine.runtime.stage import Stage
from engine.runtime.state_hash import hash_tensors
from engine.runtime.store_server import connect
from engine.runtime.tensor_spec import Border, TensorSpec
from engine.runtime.tied import tied_stages
from engine.runtime.validation import Validation
from engine.runtime.weigh_layers import weigh_layers

_MAX_TRACEBACK = 20_000  # characters that still fit one message
_ROWS_PER_MESSAGE = 500


def main(control_fd: int, events_fd: int, board_fd: int) -> int:
    """Runs one worker over the descriptors that the agent handed to it; returns its exit code."""
    sleep_exactly()
    control = Control(Link.from_fd(control_fd))
    try:
        _live(control, events_fd, board_fd)
    except Stopped:
        return ExitCode.OK
    except WorkerFailedError as suspicion:
        # A broken transfer is no verdict: the agent knows who died, and says what comes next.
        control.send("suspicion", text=str(suspicion))
        return _wait_for_the_end(control)
    except UserError as error:
        traceback.print_exc()  # to this worker's log: where in the user's own code it came from
        control.send("failed", problems=[[p.field, p.expected, p.found, p.hint] for p in error.problems])
        return error.exit_code
    except BambooError as error:
        control.send("failed", error=str(error), code=int(error.exit_code))
        return error.exit_code
    except Exception:
        text = traceback.format_exc()
        control.send("failed", traceback=text[-_MAX_TRACEBACK:], code=int(ExitCode.NOT_RECOVERED))
        return ExitCode.NOT_RECOVERED
    return ExitCode.OK


def _wait_for_the_end(control: Control) -> int:
    with contextlib.suppress(Stopped):
        control.take("bye")
    return ExitCode.OK


def _live(control: Control, events_fd: int, board_fd: int) -> None:
    welcome = control.take("welcome")
    job = Job(**welcome["job"])
    torch.set_num_threads(job.threads)
    board = ProgressBoard(board_fd, welcome["num_lines"])
    data = open_data(job)
    model = build_model(job, data.facts)
    around = join(control, welcome, job, data, model, Recorder(events_fd, welcome["worker"]), board)
    control.send("ready")
    control.take("go")
    executor = Executor(around, build_program(job.schedule, around.ownership)[around.worker])
    validation = Validation(around)
    for step in range(job.steps):
        executor.run_step(step)
        last = executor.is_last_step
        if job.audit and ((step + 1) % job.audit == 0 or last):
            _audit(around, step)
        if job.validate_every and ((step + 1) % job.validate_every == 0 or last):
            result = validation.run()
            if result is not None:
                control.send("validation", step=step, loss=result.loss, metric=result.metric)
        if last:
            break
    peaks = [[*slot, stage.peak_stash] for slot, stage in around.stages.items()]
    control.send("finished", peak_stash=peaks, peak_memory_kib=_peak_memory_kib())
    control.take("bye")  # when everybody has finished, nobody waits for a transfer any more
    around.plane.reap()
    around.plane.close()


def join(
    control: Control, welcome: Message, job: Job, data: Data, model: Model, recorder: Recorder, board: ProgressBoard
) -> Surroundings:
    """Learns the partition, builds this worker's stages, forms the data plane and learns the borders between stages."""
    worker, owners = welcome["worker"], tuple(welcome["owners"])
    if worker == owners[0]:
        control.send("partition", starts=_partition(job, model, data), layers=[each.name for each in model.layers])
    starts = tuple(control.take("partition")["starts"])
    grid = Grid(job.stages, job.microbatches, job.pipelines, tied_stages(model.ties, starts))
    ownership = Ownership(grid, owners)
    ends = (*starts[1:], len(model.layers))
    stages = {
        (pipeline, stage): Stage(job, model, pipeline, starts[stage], ends[stage])
        for pipeline, stage in ownership.slots_of(worker)
    }
    store = connect(welcome["store_port"], "epoch-0")
    plane = DataPlane(control, store, worker, welcome["ranks"])
    borders = _learn_borders(control, job, data, stages)
    return Surroundings(job, worker, ownership, starts, borders, stages, data, plane, control, recorder, board)


def _partition(job: Job, model: Model, data: Data) -> tuple[int, ...]:
    kinds = [layer.kind for layer in model.layers]
    if job.stages > len(kinds) or job.partition not in ("parameters", "profile"):
        return partition(job.partition, job.stages, kinds, ())
    return partition(job.partition, job.stages, kinds, weigh_layers(job, model, data))


def _learn_borders(control: Control, job: Job, data: Data, stages: dict[tuple[int, int], Stage]) -> tuple[Border, ...]:
    """Pipeline 0 is probed stage by stage; everybody hears every border, so that anyone could take over any stage."""
    borders: list[Border] = []
    for index in range(job.stages):
        if (0, index) in stages:
            inputs = (
                tuple(spec.zeros() for spec in borders[-1])
                if borders
                else data.microbatch(0, 0, 0, job.microbatch_size).inputs
            )
            border = stages[0, index].probe(inputs)
            control.send("border", stage=index, specs=[spec.to_json() for spec in border])
        message = control.take("border")
        assert message["stage"] == index
        borders.append(tuple(TensorSpec.from_json(spec) for spec in message["specs"]))
    for (_, index), stage in stages.items():
        stage.border = borders[index]
    return tuple(borders)


def _audit(around: Surroundings, step: int) -> None:
    """Tells the agent the hash of every layer that this worker owns."""
    for (pipeline, _), stage in around.stages.items():
        rows = [
            [index, hash_tensors(stage.optimizers[index].state_tensors()), hash_tensors(layer.named_buffers())]
            for index, layer in stage.layers.items()
        ]
        for first in range(0, len(rows), _ROWS_PER_MESSAGE):
            part = rows[first : first + _ROWS_PER_MESSAGE]
            around.control.send("audit", step=step, pipeline=pipeline, rows=part)


def _peak_memory_kib() -> int:
    """Returns the most memory that this process has held resident, in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

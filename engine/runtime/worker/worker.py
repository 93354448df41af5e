"""The life of one worker: it learns the partition, builds its stages, learns the borders, trains and exits.

    agent   Welcome       Partition            Borders             Borders           Epoch, Go ...             Bye
    worker           Cut             Border              Border                Ready               Finished
                 (worker 0)     (of stage 0)    (of the other stages)

The agent makes all decisions: job, partition, epochs, plans, commits and the end. The worker reports each of its errors
to the agent, which decides how the run continues.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from engine.core import messages
from engine.core.checkpoint_rules import Resumption, begun_with
from engine.core.checks.determinism import settings_of
from engine.core.errors import (
    GPU_ERROR,
    BambooError,
    ExitCode,
    Problem,
    TransferFailedError,
    UserError,
    WorkerException,
    explained,
)
from engine.core.faults.fault import from_plain
from engine.core.history.step_files import span_of
from engine.core.job.job import Job
from engine.core.job.partition import partition
from engine.core.messages import (
    ArmMessage,
    BusyMessage,
    InflictMessage,
    NextGroupMessage,
    RaisedMessage,
    WelcomeMessage,
)
from engine.core.ownership import Ownership
from engine.core.program.inventory import PrepareMessage, PreparePartMessage
from engine.core.protocol.worker_inputs import NoticeReceived, ProtocolMessage
from engine.core.protocol.worker_state import Output, SendMessage
from engine.core.random_key import random_key
from engine.files.accelerators import nccl_settings, nccl_stand_in
from engine.models.data import Data
from engine.models.data_sources import open_data
from engine.models.layers import Model
from engine.models.model_loader import build_model
from engine.models.user_code import RAISED, exception_of, log_exception, log_stack, running_line
from engine.runtime.checkpoint.export import GivenWeights, check_given
from engine.runtime.checkpoint.loader import load, position_of
from engine.runtime.checkpoint.writer import CheckpointWriter
from engine.runtime.device.device import HOST, Device, changed, device_trouble, open_device, set_up
from engine.runtime.device.device_faults import DeviceFaults
from engine.runtime.device.side_queue import SideQueue
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control, ControlHandler, Fenced, Killed, Stopped, give_notice_of_sigterm
from engine.runtime.process.json_log import JsonLog
from engine.runtime.process.link import Link
from engine.runtime.process.prctl import sleep_exactly
from engine.runtime.process.progress_board import LoaderStatus, ProgressBoard
from engine.runtime.process.recorder import Recorder, StepWriter
from engine.runtime.stage.class_optimizer import check_groups
from engine.runtime.stage.optimizer import check_rates
from engine.runtime.stage.random_streams import displace, set_back
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.residuals import load_graph_making
from engine.runtime.stage.sharded_stages import ShardedStages
from engine.runtime.stage.stage import Stage, build_layer, tied_stages
from engine.runtime.stage.trials import weigh_layers
from engine.runtime.transport.direct_transport import DirectBackend, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.transport.nccl_library import Communicators, NcclCommunicators, NcclLibrary
from engine.runtime.transport.nccl_queue import NcclThread
from engine.runtime.transport.nccl_transport import AgentMeeting, LastResort, NcclBackend
from engine.runtime.transport.peer_link import memory_of
from engine.runtime.transport.transport import Transport, TransportBackend
from engine.runtime.worker.borders import before_trial, learn_borders
from engine.runtime.worker.failpoints import Failpoints
from engine.runtime.worker.microbatches import DataRetries, WatchedData, retry_limits
from engine.runtime.worker.pure_check import check_pure
from engine.runtime.worker.step_end import WorkerContext
from engine.runtime.worker.training import Training, WorkerProtocol, exit_code
from engine.runtime.worker.validation import unmeasured

# The watch on a worker's start: the agent hears of a long part of it, and the log gets the stack of the main thread.
#
# Rule: the control thread looks, at each ping, so that the user's code can be named while it blocks the main thread.


_TOLD_AFTER_NS, _LOGGED_AFTER_NS = 3_000_000_000, 30_000_000_000
_PARTS: dict[CodeType, str] = {
    Control.wait_until.__code__: "",  # for the other workers
    open_data.__code__: "opens the data",
    DataRetries.call.__code__: "reads the data",
    WatchedData.microbatch.__code__: "reads the data",
    WatchedData.evaluation.__code__: "reads the data",
    build_model.__code__: "builds the model",
    build_layer.__code__: "builds a layer",
    weigh_layers.__code__: "measures the layers",
    Stage.probe.__code__: "tries its layers",
    check_pure.__code__: "tries its layers",
    check_rates.__code__: "makes the learning rates",
    load.__code__: "reads the checkpoint",
}


class StartWatch:
    """The watch on the thread that makes it; `look` is called in another one."""

    def __init__(self, control: Control):
        self._control, self._thread = control, threading.get_ident()
        self._part, self._since_ns, self._is_logged = "", now_ns(), False
        self._told = BusyMessage()

    def look(self) -> None:
        """Tells the agent of a part of the start that goes on for seconds, and of its end; logs a longer one."""
        time_ns, frame = now_ns(), sys._current_frames().get(self._thread)
        if frame is None:  # the thread has ended
            return
        if (part := part_of(frame)) != self._part:
            self._part, self._since_ns, self._is_logged = part, time_ns, False
        lasted_ns = time_ns - self._since_ns if part else 0
        is_long = lasted_ns >= _TOLD_AFTER_NS
        busy = BusyMessage(part, running_line(frame), self._since_ns) if is_long else BusyMessage()
        if busy != self._told:
            self._told = busy
            self._control.send(busy)
        if lasted_ns >= _LOGGED_AFTER_NS and not self._is_logged:
            self._is_logged = True
            log_stack(f"it {part} for {lasted_ns / 1e9:.0f} s; the stack of its main thread:", frame)


def part_of(frame: FrameType) -> str:
    """Returns the innermost part of the start that a thread is in, in words; empty if it waits for other workers."""
    return next((_PARTS[each.f_code] for each, _ in traceback.walk_stack(frame) if each.f_code in _PARTS), "")


# The backend of a worker process: its links, and NCCL between GPUs beside them if the job asks for it.
def backend_for(control: Control, welcome: WelcomeMessage, network_fd: int | None, device: Device) -> TransportBackend:
    """Returns the backend that the job of a worker asks for."""
    over_host = direct_backend(control, welcome, device)
    job = Job(**welcome.job)
    if job.backend != "nccl":
        return over_host
    for name, value in nccl_settings(welcome.worker, shares=job.share_gpu, environment=os.environ).items():
        os.environ[name] = value  # NCCL reads them once, when it is loaded
    communicators, queue = nccl_of(device)  # with an error before this worker joins, where there is none
    return NcclBackend(
        over_host,
        communicators,
        welcome.worker,
        partial(AgentMeeting, control),
        queue,
        NcclThread("nccl", network_fd),
        LastResort(partial(end_this_process, control, device.name)),
        is_audited=job.audit > 0,
    )


def nccl_of(device: Device) -> tuple[Communicators, SideQueue]:
    """Returns a worker's way to NCCL and the queue of its messages, or what a test has in their place."""
    if stand_in := nccl_stand_in():
        communicators, queue = importlib.import_module(stand_in).nccl_of(device)
        return communicators, queue
    return NcclCommunicators(NcclLibrary()), SideQueue(device)


def end_this_process(control: Control, device: str, why: str) -> None:
    """Ends this worker at once: nothing of it can be trusted to return. The agent sees the end of the process."""
    tell_end(control, device, why)
    print(why, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def tell_end(control: Control, device: str, why: str) -> None:
    """Tells the cause, which the verdict on this worker has then, as trouble of its GPU: no user's code is in it."""
    exception = WorkerException(why, gpu=f"{GPU_ERROR}: {why}, on {device}")
    control.send(RaisedMessage(now_ns(), control.at[0], exception))


def direct_backend(control: Control, welcome: WelcomeMessage, device: Device) -> DirectBackend:
    """Returns the backend of a worker that has been welcomed."""

    def room_of(size: int) -> memoryview:
        return memory_of(device.copies.room((size,), torch.uint8))

    links = Links(control, room_of, welcome.address, welcome.network)
    return DirectBackend(LinkCuts(control), links, device, carries_sizes=carries_sizes(welcome))


def carries_sizes(welcome: WelcomeMessage) -> bool:
    """Returns whether the sizes of tensors travel with them in the job of a worker."""
    return Job(**welcome.job).variable_shapes


_MOST_PROBLEMS, _MOST_NAMES = 100, 20  # in one message
BackendOf = Callable[[WelcomeMessage, Device], TransportBackend]
_ANSWER_S = 2.0  # that a worker waits for the answer to its last words
_LINGER_S = 0.05  # an exit takes milliseconds of a core, and the members are about to begin a step


class GroupMember(NamedTuple):
    """A worker in the first group, or waiting without a `plane`; the context stays, the rest changes with epochs."""

    context: WorkerContext
    ownership: Ownership
    plane: Transport | None


def main(control_fd: int, events_fd: int, steps_fd: int, board_fd: int, network_fd: int | None = None) -> int:
    """Runs one worker over the file descriptors from the agent; returns its exit code."""
    sleep_exactly()
    worker = WorkerRun((events_fd, steps_fd), board_fd)
    control = Control(Link.from_fd(control_fd), worker)

    def backend_of(welcome: WelcomeMessage, device: Device) -> TransportBackend:
        return backend_for(control, welcome, network_fd, device)

    try:
        return worker.run(control, backend_of, is_process=True)
    finally:
        worker.end_log()


class WorkerRun(ControlHandler):
    """The life of one worker: `run` has its order, `join` its start. Its control calls the other public methods."""

    def __init__(self, record_fds: tuple[int, int], board_fd: int):
        self._record_fds, self._board_fd = record_fds, board_fd
        self._protocol: WorkerProtocol | None = None
        self._watch: StartWatch | None = None  # during the start
        self._device: Device | None = None
        self._whereabouts: LoaderStatus | None = None
        self._recorder: Recorder | None = None
        self._failpoints: Failpoints | None = None
        self._training: Training | None = None
        self._log: JsonLog | None = None

    def run(self, control: Control, backend_of: BackendOf, *, is_process: bool = False) -> int:
        """Runs the worker to its end, which it tells the agent; returns its exit code. Raises Killed."""

        def aside(output: Output) -> None:
            if isinstance(output, SendMessage):
                control.send(output.message)
            elif self._training is not None:
                self._training.carry_out_aside(output)

        self._protocol, faults = (protocol := WorkerProtocol(control, aside)), DeviceFaults()
        if is_process:
            give_notice_of_sigterm(lambda: protocol.feed_aside(NoticeReceived()))
        try:
            welcome = control.take(WelcomeMessage)
            if is_process and Job(**welcome.job).log_format == "json":
                self._log = JsonLog(_host(welcome), welcome.worker, partial(self._where, control))
            return self._train(control, protocol, backend_of, faults, welcome)
        except (Stopped, Fenced):  # before it has joined
            return exit_code(protocol.feed(ProtocolMessage(control.hear())))
        except UserError as error:
            log_exception(error)  # the message to the agent has no lines of the user's code
            control.send(messages.RefusedMessage(_told(error.problems)))
            self._keep_last(control)
            return error.exit_code
        except BambooError as error:
            log_exception(error)
            control.send(messages.FailedMessage(str(error), int(error.exit_code)))
            self._keep_last(control)
            return error.exit_code
        except Killed:
            raise
        except RAISED as error:
            at_ns, trouble = now_ns(), faults.named(device_trouble(error))
            exception = replace(exception_of(error), gpu=trouble)
            control.send(RaisedMessage(at_ns, control.at[0], exception))
            log_exception(error)
            if not trouble:
                self._keep_last(control)
            return ExitCode.DEVICE_FAILED if trouble else ExitCode.NOT_RECOVERED

    def _keep_last(self, control: Control) -> None:
        """Waits for the answer to the last words: the run may end with them, and keep its last step.

        The weights here are those of that step: they change only after a commit.
        """
        if self._training is not None and (stop := control.await_stop(_ANSWER_S)) is not None:
            self._training.keep_last_step(stop)

    def _train(
        self,
        control: Control,
        protocol: WorkerProtocol,
        backend_of: BackendOf,
        faults: DeviceFaults,
        welcome: WelcomeMessage,
    ) -> int:
        job = Job(**welcome.job)
        origin = None if welcome.checkpoint is None else Resumption(**welcome.checkpoint)
        first = begun_with(origin) + 1
        control.at = (first, 0, False)
        self._watch = StartWatch(control)
        set_up(settings := settings_of(job))
        try:
            device = open_device(job.device, welcome.local_rank, shares=job.share_gpu, watch=control, faults=faults)
            self._device = device
            member = self.join(control, welcome, backend_of(welcome, device), device)
        except TransferFailedError:
            control.check()  # the others may be missing because the run is being stopped
            raise
        context = member.context
        if origin is not None and isinstance(context.data, WatchedData) and context.data.is_stream:
            context.data.begin_at(position_of(origin))
        if origin is not None and not welcome.waits:
            load(context.replicas, origin)
        check_rates(context.job)
        for stage in context.replicas.stages.values():
            for optimizer in stage.optimizers.values():
                optimizer.prepare()
        if context.job.residuals == "ship":
            load_graph_making()
        if context.job.check_pure and not welcome.waits and context.replicas.model.check_pure:
            check_pure(context, member.ownership)
        if problems := changed(settings):
            raise UserError(problems)
        self._watch = None
        training = Training(context, member.ownership, member.plane, protocol, first, joins=welcome.joins)
        self._training = training
        code = training.run()
        if code != ExitCode.OK:
            time.sleep(_LINGER_S)
        return code

    def join(
        self,
        control: Control,
        welcome: WelcomeMessage,
        backend: TransportBackend,
        device: Device = HOST,
        data_of: Callable[[Job], Data] = open_data,
    ) -> GroupMember:
        """Builds this worker's stages, joins the first group and learns the borders; a waiting worker has no stages."""
        job, worker, owners = Job(**welcome.job), welcome.worker, welcome.owners
        torch.set_num_threads(job.threads)
        board = ProgressBoard(self._board_fd, welcome.num_lines)
        self._whereabouts = whereabouts = LoaderStatus(board, worker)
        events_fd, steps_fd = self._record_fds
        steps = StepWriter(steps_fd, worker, span_of(job))
        self._recorder = recorder = Recorder(events_fd, worker, steps, host=_host(welcome))
        with set_back():  # a draw in the constructor of the data depends on the seed of the job, as one in a layer does
            displace(random_key(job.seed, "data") % 2**32)
            retries = DataRetries(retry_limits(job), recorder.write)
            data = WatchedData(retries.call(data_of, job), whereabouts, retries)
        model = build_model(job, data.facts, data)
        weights = GivenWeights(job.init) if job.init and welcome.checkpoint is None and not welcome.waits else None
        if worker == owners[0]:
            _cut(control, job, model, data, device, weights)
        starts = control.take(messages.PartitionMessage).starts
        grid = replace(job.grid, ties=tied_stages(model.ties, starts))
        ownership = Ownership(grid, owners, welcome.shadows)
        recorder.stage = min((stage for _, stage in ownership.slots_of(worker)), default=None)
        replicas = Replicas(job, model, starts, ownership.held_by(worker), device)
        if weights is not None:
            weights.fill(replicas)
        plane = None if welcome.waits else backend.joining(0, welcome.ranks).join()
        borders = learn_borders(control, worker, ownership, replicas, starts, data)
        replicas.learn(borders)
        place = welcome.checkpoints
        checkpoints = CheckpointWriter(control, replicas, place, welcome.run) if place else None
        troubles = checkpoints.troubles if checkpoints else None
        faults = [from_plain(fault) for fault in welcome.faults]
        self._failpoints = Failpoints(control, faults, replicas, backend.link_faults, troubles, recorder)
        shards = ShardedStages(worker, replicas) if job.fsdp else None
        fixed = (job, worker, starts, borders, replicas, data, control, recorder, board, self._failpoints, backend)
        has_hosts, outputs = welcome.network is not None, welcome.outputs
        context = WorkerContext(*fixed, shards, checkpoints, has_hosts=has_hosts, outputs=outputs)
        return GroupMember(context, ownership, plane)

    def pinged(self) -> None:
        """Looks at the part of the start that the main thread is in."""
        if (watch := self._watch) is not None:
            watch.look()
        if (log := self._log) is not None:
            log.copy()

    def prepare(self, order: PrepareMessage | PreparePartMessage | NextGroupMessage) -> None:
        """Lets the machine handle an order about a coming epoch."""
        if self._protocol is not None:
            self._protocol.feed_aside(ProtocolMessage(order))

    def harm(self, order: ArmMessage | InflictMessage) -> None:
        """Arms faults, or carries one out."""
        if self._failpoints is not None:
            self._failpoints.handle(order)

    def moved(self, epoch: int, step: int, index: int, inside: bool, num_computed: int = 0, action: str = "") -> None:
        """Shows the position of the main thread on the board."""
        if self._whereabouts is not None:
            self._whereabouts.move(epoch, step, index, inside, num_computed, action)

    def is_owing(self) -> bool:
        """Whether the device keeps a message."""
        return self._device is not None and self._device.copies.is_leaving

    def unfinished(self) -> str:
        """Returns the name of the GPU if that has not ended its work."""
        return "" if self._device is None else self._device.unfinished()

    def end_log(self) -> None:
        """Writes the rest of a log of JSON lines."""
        if self._log is not None:
            self._log.end()

    def _where(self, control: Control) -> tuple[int | None, int, int]:
        return None if self._recorder is None else self._recorder.stage, control.accepted, control.at[0]

    def close(self) -> None:
        """Closes the files of records and ends the copies of residuals, as the end of a process does."""
        if self._training is not None:
            self._training.end_copies()
        if self._recorder is not None:
            self._recorder.close()


def _host(welcome: WelcomeMessage) -> str:
    return welcome.host or os.uname().nodename


def _told(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Returns the first of a user's mistakes, as many as one message takes."""
    if len(problems) <= _MOST_PROBLEMS:
        return tuple(problems)
    hint = "the log of the worker has all of them"
    return (*problems[:_MOST_PROBLEMS], Problem("", f"at most {_MOST_PROBLEMS} mistakes", str(len(problems)), hint))


def _cut(
    control: Control, job: Job, model: Model, data: WatchedData, device: Device, weights: GivenWeights | None
) -> None:
    """Checks what the user has given for the layers, and tells the agent where each stage begins."""
    if weights is not None:
        check_given(weights, job, model)
    if job.param_groups:
        check_groups(job, model, {index: build_layer(job, model, index) for index in range(len(model.layers))})
    names = tuple(layer.name for layer in model.layers)
    notes = (*model.notes, *unmeasured(job, model, data))
    try:
        starts = partition_of(job, model, data, device)
    except UserError as error:
        raise explained(error, "stages", model.notes or _layers_told(names)) from None
    control.send(messages.CutMessage(starts, names, data.num_samples, notes))


def _layers_told(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the layers, and how to get more, for a module that bamboo has cut into them."""
    if not any(name.startswith("from ") for name in names):
        return ()
    shown = (*names[:_MOST_NAMES], "...") if len(names) > _MOST_NAMES else names
    return (f"they begin {', '.join(shown)}; --split SUBMODULE.* cuts the submodules of one apart",)


def partition_of(job: Job, model: Model, data: Data, device: Device) -> tuple[int, ...]:
    """Returns the first layer of each stage; raises UserError if the model cannot be cut so."""
    kinds = [layer.kind for layer in model.layers]
    is_weighed = job.slots <= len(kinds) and job.partition in ("parameters", "profile")
    with before_trial(job, model):
        weights = weigh_layers(job, model, data, device) if is_weighed else ()
    return partition(job.partition, job.stages, kinds, weights, job.blocks)

"""The effects of the kinds of faults, one function each; `registry` finds them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from typing import TYPE_CHECKING, Any

from engine.core.errors import ExitCode
from engine.core.faults.fault import DOUBLE, WITHOUT_GPU, Parameter, Parameters, Sign, TimedSignal, at_once
from engine.core.links import Disturbance
from engine.core.texts import counted
from engine.files.checkpoint_disk import FailingCall, Trouble, damaging_disk, failing_disk, full_disk
from engine.runtime.faults.registry import WorkerFaultContext, exit_by, fault_kind

if TYPE_CHECKING:
    from engine.runtime.device.device_faults import DeviceTrouble


# Corruption: silent changes of tensors. The run must detect it and end; no mechanism hides it.
#
# A NaN ends the run like a NaN of the model itself: the two cannot be told apart. A flipped bit in one of several
# replicas is found by the next audit; in a lone replica, by the comparison with the fault-free twin.

_INTO = Parameter("into", "choice", "the tensor with the NaN", "gradient", choices=("gradient", "activation"))
_BIT = Parameter("bit", "count", "which bit of the number, 0 the lowest", 0)


@fault_kind("nan", "A number in a gradient or an activation becomes NaN.", "worker", at_once, _INTO)
def nan(context: WorkerFaultContext) -> None:
    """Puts a NaN into the present gradient accumulator, or into the next output of the stage."""
    from engine.runtime.stage.stage import gradient_of

    stage = context.stage
    if stage is None:
        return
    if context.parameters["into"] == "gradient":
        layer, named = next((layer, named) for layer, named in stage.weights.items() if named)
        name, parameter = next(iter(named.items()))
        parameter.grad = gradient_of(parameter)
        parameter.grad[(0,) * parameter.dim()] = float("nan")
        context.tell(f"the gradient of {name} of {stage.where(layer)} has a NaN")
        return
    last = max(stage.layers)

    def poison(module: Any, inputs: Any, outputs: Any) -> Any:
        hook.remove()
        first, *others = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        context.tell(f"the output of {stage.where(last)} has become NaN")
        return (first * float("nan"), *others)

    hook = stage.layers[last].register_forward_hook(poison)


@fault_kind("flip-bit", "One bit of a parameter of a replica flips.", "worker", at_once, _BIT)
def flip_bit(context: WorkerFaultContext) -> None:
    """Flips a bit of the first number of the first parameter of the replica."""
    import torch

    stage = context.stage
    if stage is None:
        return
    layer, name, parameter = next(
        (layer, name, kept)
        for layer, optimizer in stage.optimizers.items()
        for name, kept in optimizer.kept.items()
        if kept.numel()
    )
    memory = parameter.data  # a write through `data` is invisible to autograd, as a flipped bit is
    first = (0,) * memory.dim()
    number = memory[first].clone().reshape(1)
    raw = number.view(torch.uint8)
    byte, bit = divmod(int(context.parameters["bit"]) % (8 * raw.numel()), 8)
    raw[byte] ^= 1 << bit
    memory[first] = number[0]
    context.tell(f"bit {context.parameters['bit']} of {name} of {stage.where(layer)} has flipped")


# Crashes: the worker ends itself by an exit, an exception or a crash.
_CODE = Parameter("code", "count", "exit code, 0 to 255", 0)


def _exits(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "exit" and value == int(parameters["code"]) % 256


def _raises(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "raised"


@fault_kind("exit", "The worker exits during its work, by default with code 0.", "worker", _exits, _CODE, ends=True)
def exits(context: WorkerFaultContext) -> None:
    """Exits without a message to the agent."""
    os._exit(int(context.parameters["code"]) % 256)


@fault_kind("raise", "A layer raises RuntimeError.", "worker", _raises, ends=True)
def raises(context: WorkerFaultContext) -> None:
    """Raises in place of a layer."""
    raise RuntimeError(f"injected by fault {context.fault!r}")


@fault_kind("abort", "The worker aborts, like a failed check in C++.", "worker", exit_by(-signal.SIGABRT), ends=True)
def abort(context: WorkerFaultContext) -> None:
    """Aborts, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@fault_kind("segfault", "The worker reads memory that is not its own.", "worker", exit_by(-signal.SIGSEGV), ends=True)
def segfault(context: WorkerFaultContext) -> None:
    """Reads address 0, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


# Disks: the disk under the checkpoints of a worker is full, fails, or changes a byte in silence.
#
# Rule: the fault acts on the next files of checkpoints that the worker writes, and is confirmed then.

_FILES = Parameter("files", "count", "how many files in a row it strikes", 1)
_ROOM = Parameter("room", "count", "bytes that the disk still takes", 0)
_BYTE = Parameter("byte", "count", "the byte that is changed, counted from the next file on", 0)
_DISK_CALL = Parameter("call", "choice", "the call that fails", "sync", choices=("write", "sync"))


@fault_kind("disk-full", "The checkpoint disk is full.", "worker", at_once, _ROOM, _FILES, acts_on="checkpoints")
def disk_full(context: WorkerFaultContext) -> None:
    """Lets the writes of the next files fail with ENOSPC."""
    _add(context, full_disk(int(context.parameters["room"]), _files(context), context.tell))


@fault_kind(
    "disk-error", "A call of the checkpoint disk fails.", "worker", at_once, _DISK_CALL, _FILES, acts_on="checkpoints"
)
def disk_error(context: WorkerFaultContext) -> None:
    """Lets a call for the next files fail with EIO."""
    call: FailingCall = "sync" if context.parameters["call"] == "sync" else "write"
    _add(context, failing_disk(call, _files(context), context.tell))


@fault_kind(
    "damage", "The disk silently flips one bit of a checkpoint.", "worker", at_once, _BYTE, acts_on="checkpoints"
)
def damage(context: WorkerFaultContext) -> None:
    """Lets the disk change one bit of a file that is about to be written."""
    _add(context, damaging_disk(int(context.parameters["byte"]), tell=context.tell))


def _files(context: WorkerFaultContext) -> int:
    return max(1, int(context.parameters["files"]))


def _add(context: WorkerFaultContext, trouble: Trouble) -> None:
    """Adds a trouble to the disk of the worker; a job that keeps no checkpoints has none, and no sign confirms it."""
    if context.troubles is not None:
        context.troubles.add(trouble)


# GPUs: a call that fails, a context that is lost, a kernel that does not end, memory that runs out.
#
# Rules: the trouble is a real one on a GPU. With `without_gpu: double`, the worker of a job on the CPU plays it, with
# the same exceptions; without it, such a job is refused before the run. No library is loaded into CUDA for it.

_CALL = Parameter("call", "count", "which operation from the moment on, 0 the next one", 0)
_WITHOUT = Parameter(
    WITHOUT_GPU, "choice", "double: the worker of a job on the CPU plays a GPU", "refused", choices=("refused", DOUBLE)
)
_ENDS = exit_by(ExitCode.DEVICE_FAILED)


@fault_kind(
    "gpu-error", "A call of the worker's GPU fails.", "worker", _ENDS, _CALL, _WITHOUT, ends=True, acts_on="GPU"
)
def gpu_error(context: WorkerFaultContext) -> None:
    """Lets a call fail; those behind it would work."""
    _strike(context, "error")


@fault_kind(
    "gpu-sticky",
    "A kernel of the worker's GPU fails, and so does every later call.",
    "worker",
    _ENDS,
    _CALL,
    _WITHOUT,
    ends=True,
    acts_on="GPU",
)
def gpu_sticky(context: WorkerFaultContext) -> None:
    """Starts a kernel whose assertion fails: the worker has lost its GPU."""
    _strike(context, "sticky")


@fault_kind(
    "gpu-oom", "The worker's GPU runs out of memory.", "worker", _ENDS, _CALL, _WITHOUT, ends=True, acts_on="GPU"
)
def gpu_oom(context: WorkerFaultContext) -> None:
    """Asks for more memory than there is, and takes none from the others."""
    _strike(context, "memory")


@fault_kind("gpu-hang", "A kernel of the worker's GPU does not end.", "worker", at_once, _CALL, _WITHOUT, acts_on="GPU")
def gpu_hang(context: WorkerFaultContext) -> None:
    """Starts a kernel that does not end; the worker hangs where it waits for the GPU."""
    _strike(context, "hang")


def _strike(context: WorkerFaultContext, trouble: DeviceTrouble) -> None:
    device, call = context.device, int(context.parameters["call"])
    device.faults.strike(context.fault, trouble, device.place, call, context.tell, context.control.stand_still)


# Links: what two workers send each other is lost in silence, late or held up, or their link ends.
#
# A fault counts once a frame or a message has met it.

_PEER = Parameter("peer", "worker", "the worker at the other end", required=True)
_DIRECTION = Parameter(
    "direction",
    "choice",
    "there: what the worker sends; back: what it should receive",
    "both",
    choices=("there", "back", "both"),
)
_LINK_FOR = Parameter("for", "duration", "how long, then all of it comes through; without it, forever", least=1)
_BY = Parameter("by", "duration", "how much later each frame arrives", required=True, least=1)


@fault_kind(
    "cut-link", "The connection to another worker goes silent.", "worker", at_once, _PEER, _DIRECTION, _LINK_FOR
)
def cut_link(context: WorkerFaultContext) -> None:
    """Cuts the connection to the peer, if it is a member of the worker's group."""
    parameters = context.parameters
    peer, direction, for_ns = int(parameters["peer"]), str(parameters["direction"]), parameters.get("for_ns")

    def met(way: str) -> None:
        context.tell(f"the connection to worker {peer} is cut ({direction}): it held up a message {way}")

    context.links.cut(peer, direction, None if for_ns is None else int(for_ns), met)


@fault_kind(
    *("delay-link", "A link delivers all frames late.", "worker", at_once),
    *(_PEER, _DIRECTION, _BY, _LINK_FOR),
    acts_on="frames",
)
def delay_link(context: WorkerFaultContext) -> None:
    """Delays the frames of the link to the peer, if there is one."""
    _disturb(context, "delay")


@fault_kind(
    *("stall-link", "A link accepts all frames and delivers none.", "worker", at_once),
    *(_PEER, _DIRECTION, _LINK_FOR),
    acts_on="frames",
)
def stall_link(context: WorkerFaultContext) -> None:
    """Holds the frames of the link to the peer, if there is one."""
    _disturb(context, "stall")


@fault_kind("reset-link", "A link ends inside its next frame.", "worker", at_once, _PEER, _DIRECTION, acts_on="frames")
def reset_link(context: WorkerFaultContext) -> None:
    """Resets the link to the peer inside its next frame, if there is one."""
    _disturb(context, "reset")


def _disturb(context: WorkerFaultContext, kind: Any) -> None:
    parameters = dict(context.parameters)
    peer = int(parameters.pop("peer"))
    fields: dict[str, Any] = parameters

    def met(there: int, back: int) -> None:
        context.tell(f"the {kind} of the link to worker {peer} met {counted(there, 'frame')} there and {back} back")

    context.links.disturb(peer, Disturbance(kind, **fields), met)


# Memory: a worker that allocates more memory than its limit.
_CHUNK_BYTES = 64 << 20
_MARGIN_BYTES = 256 << 20  # a few allocations succeed first


def _runs_out(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "raised" or (sign == "exit" and value == -signal.SIGKILL)


@fault_kind(
    "oom", "The worker runs out of memory: its limit is lowered, then it allocates.", "worker", _runs_out, ends=True
)
def oom(context: WorkerFaultContext) -> None:
    """Allocates until MemoryError; does not touch the memory, so that the host does not run short."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MARGIN_BYTES, hard))
    hoard = []
    try:
        while True:
            hoard.append(bytearray(_CHUNK_BYTES))
    except MemoryError as error:
        hoard.clear()
        raise MemoryError(f"injected by fault {context.fault!r}") from error


# No operation: a fault without an effect, to measure the cost of injection and to test that its moment comes.
@fault_kind("noop", "Nothing is done; the moment is recorded.", "worker", at_once)
def noop(context: WorkerFaultContext) -> None:
    """Confirms that the moment has come."""
    context.tell("nothing was done")


# Signals: faults that the agent injects from outside, through a pidfd.
_GRACE = Parameter(
    "grace", "duration", "from SIGTERM to SIGKILL, which is sent only if the worker still lives", 120 * 10**9
)
_FOR = Parameter("for", "duration", "how long it stands still; without it, until the worker is killed")


def _warned(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign in ("notice", "exit")


def _stands_still(sign: Sign, value: Any, parameters: Parameters) -> bool:
    return sign == "state" and value == "T"


@fault_kind("kill", "Ends the worker at once: SIGKILL.", "agent", exit_by(-signal.SIGKILL), ends=True)
def kill(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGKILL."""
    return (TimedSignal(0, signal.SIGKILL),)


@fault_kind("terminate", "Warns the worker as clouds do: SIGTERM, later SIGKILL.", "agent", _warned, _GRACE, ends=True)
def terminate(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGTERM, and SIGKILL after the grace period."""
    return TimedSignal(0, signal.SIGTERM), TimedSignal(int(parameters["grace_ns"]), signal.SIGKILL)


@fault_kind("stop", "Stops the worker: SIGSTOP, later SIGCONT.", "agent", _stands_still, _FOR)
def stop(parameters: Parameters) -> tuple[TimedSignal, ...]:
    """Returns SIGSTOP, and SIGCONT after the given time, if any."""
    stops = (TimedSignal(0, signal.SIGSTOP),)
    return (*stops, TimedSignal(int(parameters["for_ns"]), signal.SIGCONT)) if "for_ns" in parameters else stops


# Slowdown: a worker that is slow or hangs while its process lives.
_FOREVER_S = 1_000_000

_FACTOR = Parameter("factor", "number", "how many times as long a forward or backward takes", 4.0)
_SLOW_FOR = Parameter(
    "for", "duration", "how long, but at least one action: a slow step alone is not noticed", required=True
)
_HANG_FOR = Parameter("for", "duration", "how long; without it, until the worker is killed")
_GIL = Parameter(
    "gil", "choice", "held: its other threads hang too, heartbeat included", "released", choices=("released", "held")
)


@fault_kind("slow", "The worker computes more slowly for a while.", "worker", at_once, _FACTOR, _SLOW_FOR)
def slow(context: WorkerFaultContext) -> None:
    """Slows down compute actions; the first slow one confirms the effect."""
    context.slow_down(float(context.parameters["factor"]), int(context.parameters["for_ns"]))


@fault_kind("hang", "The worker never finishes an action.", "worker", at_once, _HANG_FOR, _GIL)
def hang(context: WorkerFaultContext) -> None:
    """Waits inside an action, with or without the GIL."""
    for_ns = context.parameters.get("for_ns")
    seconds = _FOREVER_S if for_ns is None else int(for_ns) / 1e9
    holds_gil = context.parameters["gil"] == "held"
    context.tell(f"hangs with the GIL {context.parameters['gil']}")
    with context.control.busy():
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if holds_gil:
                # PyDLL keeps the GIL during the call.
                ctypes.PyDLL(None).poll(None, 0, round(left_s * 1000))
            else:
                context.control.stand_still(left_s)

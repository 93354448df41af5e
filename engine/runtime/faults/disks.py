"""Disks: the disk under the checkpoints of a worker is full, fails, or changes a byte in silence.

Rule: the fault acts on the next files of checkpoints that the worker writes, and is confirmed then.
"""

from __future__ import annotations

from engine.core.faults.fault_kind import Parameter, at_once
from engine.files.checkpoints.faulty_disk import FailingCall, Trouble, damaging_disk, failing_disk, full_disk
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind

_FILES = Parameter("files", "count", "how many files in a row it strikes", 1)
_ROOM = Parameter("room", "count", "bytes that the disk still takes", 0)
_BYTE = Parameter("byte", "count", "the byte that is changed, counted from the next file on", 0)
_CALL = Parameter("call", "choice", "the call that fails", "sync", choices=("write", "sync"))


@fault_kind("disk-full", "The disk of checkpoints has no room left.", "worker", at_once, _ROOM, _FILES)
def disk_full(context: WorkerFaultContext) -> None:
    """Lets the writes of the next files fail with ENOSPC."""
    _add(context, full_disk(int(context.parameters["room"]), _files(context), context.tell))


@fault_kind("disk-error", "A call of the disk of checkpoints fails.", "worker", at_once, _CALL, _FILES)
def disk_error(context: WorkerFaultContext) -> None:
    """Lets a call for the next files fail with EIO."""
    call: FailingCall = "sync" if context.parameters["call"] == "sync" else "write"
    _add(context, failing_disk(call, _files(context), context.tell))


@fault_kind("damage", "The disk changes one bit of a checkpoint in silence.", "worker", at_once, _BYTE)
def damage(context: WorkerFaultContext) -> None:
    """Lets the disk change one bit of a file that is about to be written."""
    _add(context, damaging_disk(int(context.parameters["byte"]), tell=context.tell))


def _files(context: WorkerFaultContext) -> int:
    return max(1, int(context.parameters["files"]))


def _add(context: WorkerFaultContext, trouble: Trouble) -> None:
    """Adds a trouble to the disk of the worker; a job that keeps no checkpoints has none, and no sign confirms it."""
    if context.troubles is not None:
        context.troubles.add(trouble)

"""GPUs: a call that fails, a context that is lost, a kernel that does not end, memory that runs out.

Rules: the trouble is a real one on a GPU. With `without_gpu: double`, the worker of a job on the CPU plays it, with the
same exceptions; without it, such a job is refused before the run. No library is loaded into CUDA for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.errors import ExitCode
from engine.core.faults.fault_kind import DOUBLE, WITHOUT_GPU, Parameter, at_once
from engine.runtime.faults.registry import WorkerFaultContext, exit_by, fault_kind

if TYPE_CHECKING:
    from engine.runtime.device.device_faults import DeviceTrouble

_CALL = Parameter("call", "count", "which operation from the moment on, 0 the next one", 0)
_WITHOUT = Parameter(
    WITHOUT_GPU, "choice", "double: the worker of a job on the CPU plays a GPU", "refused", choices=("refused", DOUBLE)
)
_ENDS = exit_by(ExitCode.DEVICE_FAILED)


@fault_kind("gpu-error", "A call of the worker's GPU fails.", "worker", _ENDS, _CALL, _WITHOUT, ends=True)
def gpu_error(context: WorkerFaultContext) -> None:
    """Lets a call fail; those behind it would work."""
    _strike(context, "error")


@fault_kind(
    "gpu-sticky",
    "A kernel of the worker's GPU fails, and each later call.",
    "worker",
    _ENDS,
    _CALL,
    _WITHOUT,
    ends=True,
)
def gpu_sticky(context: WorkerFaultContext) -> None:
    """Starts a kernel whose assertion fails: the worker has lost its GPU."""
    _strike(context, "sticky")


@fault_kind("gpu-oom", "The worker's GPU runs out of memory.", "worker", _ENDS, _CALL, _WITHOUT, ends=True)
def gpu_oom(context: WorkerFaultContext) -> None:
    """Asks for more memory than there is, and takes none from the others."""
    _strike(context, "memory")


@fault_kind("gpu-hang", "A kernel of the worker's GPU does not end.", "worker", at_once, _CALL, _WITHOUT)
def gpu_hang(context: WorkerFaultContext) -> None:
    """Starts a kernel that does not end; the worker hangs where it waits for the GPU."""
    _strike(context, "hang")


def _strike(context: WorkerFaultContext, trouble: DeviceTrouble) -> None:
    device, call = context.device, int(context.parameters["call"])
    device.faults.strike(context.fault, trouble, device.place, call, context.tell, context.control.stand_still)

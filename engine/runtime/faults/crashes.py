"""Crashes: the worker ends itself by an exit, an exception or a crash."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import Any

from engine.core.faults.fault_kind import Parameter, Parameters, Sign
from engine.runtime.faults.registry import WorkerFaultContext, exit_by, fault_kind

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


@fault_kind("abort", "The worker aborts, as a failed check in C++ does.", "worker", exit_by(-signal.SIGABRT), ends=True)
def abort(context: WorkerFaultContext) -> None:
    """Aborts, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@fault_kind("segfault", "The worker reads memory that is not its own.", "worker", exit_by(-signal.SIGSEGV), ends=True)
def segfault(context: WorkerFaultContext) -> None:
    """Reads address 0, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)

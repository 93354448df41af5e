"""The backend of a worker process: its links, and NCCL between GPUs beside them if the job asks for it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import partial

import torch

from engine.core.config.job import Job
from engine.core.messages import RaisedMessage, WelcomeMessage
from engine.core.worker_exception import GPU_ERROR, WorkerException
from engine.files.nccl_settings import nccl_settings, nccl_stand_in
from engine.runtime.device.device import Device
from engine.runtime.device.side_queue import SideQueue
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.recorder import now_ns
from engine.runtime.links.links import Links
from engine.runtime.links.memory import memory_of
from engine.runtime.nccl.communicator import Communicators
from engine.runtime.nccl.library import NcclLibrary
from engine.runtime.nccl.meeting import AgentMeeting
from engine.runtime.nccl.nccl_backend import NcclBackend
from engine.runtime.nccl.nccl_communicator import NcclCommunicators
from engine.runtime.nccl.nccl_thread import NcclThread
from engine.runtime.nccl.nccl_transport import LastResort
from engine.runtime.transport.direct_transport import DirectBackend
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.transport import TransportBackend


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
    told = WorkerException(why, gpu=f"{GPU_ERROR}: {why}, on {device}")
    control.send(RaisedMessage(now_ns(), control.at[0], told))


def direct_backend(control: Control, welcome: WelcomeMessage, device: Device) -> DirectBackend:
    """Returns the backend of a worker that has been welcomed."""

    def room_of(size: int) -> memoryview:
        return memory_of(device.copies.room((size,), torch.uint8))

    links = Links(control, room_of, welcome.address, welcome.network)
    return DirectBackend(LinkCuts(control), links, device)

"""The parts of a worker that stay the same for a whole job; training, planning and validation share them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.config.job import Job
from engine.models.data import Data
from engine.runtime.checkpoint.writer import CheckpointWriter
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.replica.replicas import Replicas
from engine.runtime.replica.sharded_stages import ShardedStages
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transport import TransportBackend
from engine.runtime.worker.failpoints import Failpoints


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The fixed parts of one worker; `starts` has the first layer of each stage, `borders` one border per stage."""

    job: Job
    worker: int
    starts: tuple[int, ...]
    borders: tuple[Border, ...]
    replicas: Replicas
    data: Data
    control: Control
    recorder: Recorder
    board: ProgressBoard
    failpoints: Failpoints
    backend: TransportBackend
    shards: ShardedStages | None = None
    checkpoints: CheckpointWriter | None = None
    has_hosts: bool = False  # the run has several hosts

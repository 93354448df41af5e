"""The peer of the checkpoint benchmark: torch.distributed.checkpoint.async_save of the state of the demo.

It prints for each save when the call returned, and when the state was on disk.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.checkpoint_rules import StateShare
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.checkpoint.writer import state_of
from engine.runtime.stage.replicas import Replicas


def demo_replicas() -> Replicas:
    """Returns the whole demo as one stage, with its optimizer state."""
    job = Job(stages=1, redundancy="none")
    model = build_model(job, open_data(job).facts)
    replicas = Replicas(job, model, (0,), [(0, 0)])
    stage = replicas.stages[0, 0]
    for index, optimizer in stage.optimizers.items():
        optimizer.step(1e-3, {name: torch.ones_like(each) for name, each in stage.weights[index].items()})
    return replicas


def demo_state(replicas: Replicas) -> dict[str, Tensor]:
    """Returns the tensors of the demo by unique names."""
    states = state_of(StateShare((0, 0)), replicas.stages)
    return {f"{each.layer}/{name}": tensor for each in states for name, tensor in (*each.live, *each.fixed)}


def main() -> None:
    """Saves; the arguments are the number of saves and the folder."""
    from torch.distributed import checkpoint  # which takes a second

    num_saves, folder = int(sys.argv[1]), Path(sys.argv[2])
    state = demo_state(demo_replicas())
    for step in range(num_saves):
        start_s = time.monotonic()
        saved: Any = checkpoint.async_save(state, checkpoint_id=str(folder / str(step)))
        returned_s = time.monotonic() - start_s
        saved.result()
        os.write(1, f"returned_s={returned_s:.6f} saved_s={time.monotonic() - start_s:.6f}\n".encode())


if __name__ == "__main__":
    main()

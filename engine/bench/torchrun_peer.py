"""The peer of benchmarks, for torchrun: trains with our layers, data and partition, and torch's pipelining and AdamW.

It prints the time at which each step ended. For the recovery benchmark it saves a checkpoint at every step, and is
killed once. After a restart it resumes after the newest step that every rank has saved. A checkpoint is the bytes of
tensors in a fixed order, without code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, distributed

from engine.bench.torch_side import rank_of_torchrun
from engine.core.job.job import Job


def main() -> None:
    """Runs one rank; the arguments are the job as JSON, and optionally the step of a kill and a checkpoint folder."""
    job, *others = sys.argv[1:]
    _train(Job(**json.loads(job)), int(others[0]) if others else -1, Path(others[1]) if others else None)


def _train(job: Job, fatal_step: int, folder: Path | None) -> None:
    rank, pipeline, optimizer = rank_of_torchrun(job)
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(0 if folder is None else _load(folder, rank, optimizer), job.steps):
        if restart == 0 and (rank, step) == (job.stages // 2, fatal_step):
            os.kill(os.getpid(), signal.SIGKILL)
        pipeline.run_step()
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None:
            _save(folder / f"{rank}-{step}", optimizer)
        # One write: the lines of the ranks share a pipe.
        os.write(1, f"restart={restart} step={step} ended_ns={time.monotonic_ns()}\n".encode())
    distributed.barrier()
    distributed.destroy_process_group()


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters with their optimizer states; makes the states if they do not exist yet."""
    tensors: list[Tensor] = []
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        tensors += [parameter.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return tensors


def _save(path: Path, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for tensor in _tensors(optimizer):
            file.write(tensor.numpy().tobytes())
    temporary.replace(path)


def _load(folder: Path, rank: int, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint that all ranks have and returns the step that follows."""
    saved = [int(path.name.split("-")[1]) for path in folder.glob(f"{rank}-*") if not path.suffix]
    newest = torch.tensor(max(saved, default=-1))
    distributed.all_reduce(newest, distributed.ReduceOp.MIN)
    if newest >= 0:
        data, at = bytearray((folder / f"{rank}-{int(newest)}").read_bytes()), 0
        for tensor in _tensors(optimizer):
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape))
            at += tensor.numel() * tensor.element_size()
    return int(newest) + 1


if __name__ == "__main__":
    main()

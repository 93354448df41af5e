"""The lines by which a job of any launcher reports to `bamboo inject`: its steps, and hashes of its weights.

Rules: a script of others imports this, so it needs the standard library only. Outside of bamboo, without
`BAMBOO_PROGRESS`, both functions do nothing. A call keeps no state and appends one whole line in one write, so it works
in threads and after a fork. A line that cannot be written is left out: a full disk must not end the job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_FOLDER = "BAMBOO_PROGRESS"
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")


def progress(step: int, loss: float | None = None, samples: Iterable[int | str] | None = None) -> None:
    """Reports that this process has finished a step; costs microseconds, and nothing outside of `bamboo inject`.

    A resumed job continues the numbers of the steps. The loss may be a tensor; one on a GPU is waited for. `samples`
    identify the samples that this process counted in the step, by which lost and doubled ones are found.
    """
    if folder := os.environ.get(_FOLDER):
        ids = None if samples is None else [*getattr(samples, "tolist", lambda: samples)()]
        _append(folder, "", {"step": int(step), "loss": None if loss is None else float(loss), "samples": ids})


def fingerprint(
    model: nn.Module | Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    *,
    step: int,
    sample: int | None = 64,
    every: int = 20,
) -> None:
    """Reports a hash of each tensor after a step, which is compared with that of the same job without faults.

    Call it after each step: only steps that `every` divides are hashed. `model` is a module, or tensors by name; the
    state and the settings of the optimizer are hashed too. `sample` is the number of elements of each tensor that are
    hashed, at fixed positions; None for all. A process hashes its own part of a sharded tensor.
    """
    folder = os.environ.get(_FOLDER)
    if folder and step % every == 0:
        from engine.external.weights import fingerprint_of

        _append(folder, ".fingerprints", {"step": int(step), "tensors": fingerprint_of(model, optimizer, sample)})


def _append(folder: str, kind: str, fields: dict[str, Any]) -> None:
    now_ns, pid = time.monotonic_ns(), os.getpid()
    rank = next((int(value) for name in _RANKS if (value := os.environ.get(name, "")).isdigit()), None)
    line = json.dumps({"t_ns": now_ns, "pid": pid, "rank": rank, **fields}, separators=(",", ":"))
    try:
        path = f"{folder}/{pid if rank is None else rank}-{pid}{kind}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)
    except OSError as error:
        sys.stderr.write(f"bamboo: step {fields['step']} is not reported: {error}\n")

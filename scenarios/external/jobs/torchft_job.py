"""The job of `bamboo bench referee` in torchft: a lighthouse, and two groups of one rank, each started by torchrun.

A process without a rank is the lighthouse, and starts the groups. A group that begins anew gets the state of the other
one, or if that is gone too, of the newest checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import job_model
import torch
from torch import nn

import bamboo

_PATIENCE = timedelta(seconds=job_model.TIMEOUT_S)


def start_groups() -> int:
    """Returns the exit code: 0 if both groups have ended well."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    groups = [
        subprocess.Popen(
            [*torchrun, *sys.argv],
            env={**os.environ, "REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"},
        )
        for group in range(job_model.RANKS)
    ]
    codes = [group.wait() for group in groups]
    lighthouse.shutdown()
    return max(map(abs, codes))


def main(path: Path) -> None:
    """Trains until the steps of the job are committed."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    group = int(os.environ["REPLICA_GROUP_ID"])
    plain = job_model.model()
    inner = job_model.optimizer(plain)

    def state() -> dict[str, object]:
        return {"model": plain.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, dict[str, object]]) -> None:
        plain.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        init_sync=False,  # all begin with the same weights
        replica_id=f"group{group}",
        hostname="127.0.0.1",
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        connect_timeout=_PATIENCE,
    )
    model, optimizer = DistributedDataParallel(manager, plain), OptimizerWrapper(manager, inner)
    (path.parents[1] / f"group{group}").touch()
    while len(list(path.parents[1].glob("group*"))) < job_model.RANKS:
        time.sleep(0.01)  # else the first one trains some steps alone
    if path.exists():
        saved = torch.load(path, weights_only=True)
        manager.load_state_dict(saved.pop("manager"))
        load(saved)
    while (step := manager.current_step()) < job_model.STEPS:
        optimizer.zero_grad()
        samples = job_model.samples_of(step, manager.participating_rank() or 0)
        inputs, targets = job_model.batch(samples)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if manager.current_step() == step:
            continue  # the step was discarded
        step = manager.current_step() - 1  # of a group that has come back, it is that of the other one
        bamboo.progress(step, loss=loss.item(), samples=samples if manager.is_participating() else [])
        bamboo.fingerprint(plain, inner, step=step, every=10, sample=None)
        if step % job_model.EVERY == job_model.EVERY - 1 and manager.participating_rank() == 0:
            job_model.save({**state(), "manager": manager.state_dict()}, path)
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads wait for a quorum that never forms


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(sys.argv[1]) / "checkpoints/state.pt")
    else:
        sys.exit(start_groups())

"""The job of `bamboo bench referee` with NVRx's restart in the process: two ranks, and two processes that stand by.

A process without a rank starts the others, starts none again, and keeps the store by which they find one another.
"""

import logging
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import ddp_job
import job_model
from torch.distributed import PrefixStore, TCPStore, init_process_group

_PROCESSES = 2 * job_model.RANKS
_PATIENCE = timedelta(seconds=job_model.TIMEOUT_S)


def start_processes() -> int:
    """Returns the exit code: 0 if as many processes as there are ranks have ended well."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(_PROCESSES)}
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **address, "RANK": str(rank)})
        for rank in range(_PROCESSES)
    ]
    return sorted(abs(process.wait()) for process in processes)[job_model.RANKS - 1]


def main(path: Path) -> None:
    """Trains; after a failure, all processes that are left begin again from the checkpoint."""
    from nvidia_resiliency_ext import inprocess

    ranks = inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(job_model.RANKS),
        inprocess.rank_assignment.ActivateAllRanks(),
        inprocess.rank_assignment.FillGaps(),
    )

    @inprocess.Wrapper(
        rank_assignment=ranks,
        soft_timeout=_PATIENCE,
        hard_timeout=_PATIENCE * 1.5,
        heartbeat_timeout=_PATIENCE,
    )
    def train(call: inprocess.CallWrapper = None) -> None:
        server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = PrefixStore(f"training-{call.iteration}", server)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        ddp_job.train(path)

    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        logging.basicConfig(level=logging.WARNING)
        main(Path(sys.argv[1]) / "checkpoints/state.pt")
    else:
        sys.exit(start_processes())

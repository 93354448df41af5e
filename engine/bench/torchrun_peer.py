"""The peer of the launch benchmark, for torchrun: trains one step of a job and prints the time of its end.

It uses our layers, data and partition, and torch's pipelining and AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time

from torch import distributed

from engine.bench.torch_side import rank_of_torchrun
from engine.core.job.job import Job


def main() -> None:
    """Runs one rank; the job is the only argument, as JSON."""
    _, pipeline, optimizer = rank_of_torchrun(Job(**json.loads(sys.argv[1])))
    pipeline.run_step()
    optimizer.step()
    # One write: the lines of the ranks share a pipe.
    os.write(1, f"finished_ns={time.monotonic_ns()}\n".encode())
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

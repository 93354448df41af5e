"""A launcher of a made-up job, in the standard library: two ranks in step, restarted together when one ends early.

    toy_launcher.py FOLDER [STEPS RESTARTS [PRELUDE]]

A rank counts steps of 20 ms from the newest one of both, and reports them as `bamboo.progress` does, before it notes
them. With a prelude each rank starts a program that outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def train(folder: Path, steps: int, prelude: str) -> None:
    """Runs one rank: it ends a step when the other rank has reached it."""
    rank = int(os.environ["RANK"])
    if prelude:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    own, other = folder / f"step-{rank}", folder / f"step-{1 - rank}"
    first = min(int(each.read_text() or -1) if each.exists() else -1 for each in (own, other)) + 1
    report = Path(os.environ["BAMBOO_PROGRESS"]) / f"{rank}-{os.getpid()}.jsonl"
    for step in range(first, steps):
        time.sleep(0.02)
        line = {"t_ns": time.monotonic_ns(), "pid": os.getpid(), "rank": rank, "step": step, "loss": 1.0}
        with report.open("a") as file:  # first: a rank that is killed here does the step again, and none is lost
            file.write(json.dumps(line) + "\n")
        own.with_suffix(".new").write_text(str(step))
        own.with_suffix(".new").replace(own)
        while int(other.read_text() if other.exists() else -1) < step:
            time.sleep(0.001)


def main() -> None:
    """Starts the ranks, and all of them once more when one fails."""
    folder, (steps, restarts) = Path(sys.argv[1]), map(int, sys.argv[2:4] or ("150", "1"))
    prelude = "".join(sys.argv[4:])
    if "RANK" in os.environ:
        train(folder, steps, prelude)
        return
    for _ in range(restarts + 1):
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(rank)}) for rank in (0, 1)
        ]
        signal.signal(signal.SIGTERM, lambda number, frame: [*map(subprocess.Popen.kill, ranks), sys.exit(1)])  # noqa: B023
        while all(each.poll() in (None, 0) for each in ranks) and any(each.poll() is None for each in ranks):
            time.sleep(0.01)
        failed = [(number, each) for number, each in enumerate(ranks) if each.poll() not in (None, 0)]
        if not failed:
            sys.exit(0)
        number, first = failed[0]
        print(f"failed (exitcode: {first.poll()}) local_rank: {number} (pid: {first.pid}) of toy", flush=True)
        for each in ranks:
            each.kill()
            each.wait()
    sys.exit(1)


if __name__ == "__main__":
    main()

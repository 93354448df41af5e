"""A program that begins a session as `bamboo run` does, up to its first forked process, and prints the times.

Called as ``-m engine.bench.start FOLDER PRIVATE``; with an empty PRIVATE it leaves the store out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from engine.core.config.job import Job
from engine.core.ownership import Grid, one_slot_each
from engine.runtime.agent.agent import AGENT
from engine.runtime.agent.session import first_state, join_store
from engine.runtime.agent.worker_handles import RendezvousStore
from engine.runtime.ipc.recorder import Recorder, now_ns, open_events
from engine.runtime.process.children import ForkServer


def main(folder: Path, private: bool) -> None:
    """Begins a session and ends it again."""
    job = Job()
    with contextlib.ExitStack() as stack:
        events_fd = open_events(folder / "events.jsonl")
        stack.callback(os.close, events_fd)
        since_ns = now_ns()
        server = stack.enter_context(ForkServer())
        if private:
            state = first_state(job, one_slot_each(Grid(job.stages, job.microbatches)))
            join_store(stack, None, "bench", folder, state, Recorder(events_fd, AGENT))
        joined_ns = now_ns()
        store = RendezvousStore(server, folder)
        forked_ns = now_ns()
        store.close()
    print(json.dumps({"joined_s": (joined_ns - since_ns) / 1e9, "forked_s": (forked_ns - since_ns) / 1e9}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), bool(sys.argv[2]))

"""``python -m tests.e2e.residual_soak``: a worker of three gets notice inside a step, with time left, or none.

Whatever travels, the bits are those of the twin and each sample counts once; a forward whose residuals were sent is run
once. The table says what was sent, and how many forwards ran again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.action import FORWARD_OPS, Action, Op, parse_action
from engine.core.checks.samples import miscounted
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences
from tests.e2e.test_real_kills import fault

_GPT = {"width": 192, "depth": 10, "heads": 4}  # twelve layers
_OF_ALL = {
    "stages": 3,
    "microbatches": 16,
    "microbatch_size": 8,
    "steps": 2,
    "seed": 3,
    "validate_every": 0,
    "schedule": "gpipe",
}
_RESNET = {"model": "resnet18", "model_args": {"width": 32}, "microbatch_size": 32}  # with BatchNorm
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "resnet18": _RESNET,
    "dropout": {"model_args": {**_GPT, "dropout": 0.1}},
    "tied": {"model_args": {**_GPT, "tied": True}},
    "checkpointed": {"activation_checkpoint": 2},
    "float16": {"model_args": {**_GPT, "width": 48}, "microbatch_size": 4, "dtype": "float16"},
}
SHARES = "0,0.005,0.05,0.6"  # 0, 1, 10 and 120 s, for a step of 200 s
_AT = "1:1:F:9"


def _of(action: Action) -> tuple[int, int, int]:
    return action.pipeline, action.stage, action.microbatch


def row(runs: Runs, job: Job, name: str, grace_s: float) -> tuple[str, int, list[str]]:
    """Returns a row of the table, how many residuals were sent, and all that is wrong."""
    twin = runs.twin(replace(job, residuals="recompute"))
    ending, events = runs.run(job, [fault(_AT, job, "terminate", grace_ns=round(grace_s * 1e9))])
    wrong = [*differences(ending, twin), *map(str, miscounted(read_history(runs.last / "events.jsonl"), job))]
    ran: Counter[tuple[int, ...]] = Counter()
    came = set()
    for each in events:
        action = parse_action(each["action"]) if each["event"] == "action" else None
        if action is not None and action.op in FORWARD_OPS:
            ran[each["step"], *_of(action)] += 1
        elif action is not None and action.op is Op.SHIP:
            came.add((each["step"], *_of(action)))
    wrong += [f"forward {each} ran again, although its residuals were sent" for each in came if ran[each] > 1]
    ways = [each["way"] for each in events if each["event"] == "way_out"] or ["as a death"]
    mib = sum(each["bytes"] for each in events if each["event"] == "residuals") / 2**20
    why = "; ".join(each["stuck"] for each in events if each["event"] == "residuals" and each["stuck"])
    text = f"{name:12} {grace_s:6.2f} s {ways[-1]:10} {len(came):3} sent {mib:7.1f} MiB"
    return f"{text} {sum(ran.values()) - len(ran):3} again {why}", len(came), wrong


def step_s(runs: Runs) -> float:
    """Returns how long the first step of the last run took."""
    history = read_history(runs.last / "events.jsonl")
    return (history.commits.at_ns[0] - history.epochs[0].at_ns) / 1e9  # from when all workers have joined


def main() -> None:
    """Prints the table; exits with 1 if anything is wrong, or if no residual of a kind was sent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--residuals", default="ship")
    parser.add_argument("--shares", default=SHARES, help="the graces, as shares of the step; the first one is 0")
    given = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="residual-soak-") as folder, ForkServer() as server:
        runs = Runs(Path(folder), server)
        for name in given.kinds.split(","):
            job = Job(**{"model": "gpt", "model_args": _GPT, **_OF_ALL, **KINDS[name], "residuals": given.residuals})
            num_sent, whole_s = 0, 0.0
            for share in map(float, given.shares.split(",")):
                text, sent, here = row(runs, job, name, share * whole_s)
                print(text, *here, sep="\n  ", flush=True)
                num_sent, wrong, whole_s = num_sent + sent, wrong + here, whole_s or step_s(runs)
            if given.residuals == "ship" and not num_sent:
                wrong.append(f"{name}: no residual was sent")
    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

"""Resumes every step of jobs of 12 steps, written with one cut and read with another: no bit may differ.

    python -m tests.e2e.resume_grid
    python -m tests.e2e.resume_grid --only mlp-x2 --only fsdp

Three models, with one and with two pipelines, run in this process. With `fsdp` a stage in shards is written and read
whole, and the other way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.checkpoint_rules import Resumption
from engine.core.checks.trajectory import first_difference
from engine.core.job.job import Job
from engine.runtime.agent.run_state import Ending
from tests.runtime.kept_states import keeping_all, kept_states
from tests.runtime.thread_runs import run_in_threads

MODELS = {
    "gpt": Job(model_args={"width": 16, "dropout": 0.1, "tied": True}, steps=12, microbatches=4, microbatch_size=2),
    "mlp": Job(model="mlp", optimizer="sgd", optimizer_args={"momentum": 0.9}, steps=12, microbatches=2),
    "resnet18": Job(model="resnet18", model_args={"width": 4}, steps=12, microbatches=2, microbatch_size=2),
}
_SHARDS: dict[str, Any] = {"redundancy": "none", "fsdp": 1}
Cut = dict[str, Any]


def cuts(pipelines: int) -> tuple[Cut, ...]:
    """Returns one to four stages, and four on half the workers."""
    return (
        {"stages": 1, "redundancy": "none"},
        {"stages": 2},
        {"stages": 3, "redundancy": "eager"},
        {"stages": 4, "schedule": "gpipe"},
        {"stages": 4, "schedule": "gpipe", "workers": 2 * pipelines},
    )


class Count:
    """Counts resumed runs and compared rows, and the runs that differ."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.resumed = self.rows = self.wrong = 0

    def tell(self) -> None:
        """Prints the numbers so far."""
        print(f"{self._name}: {self.resumed} resumed, {self.rows} rows compared, {self.wrong} differ", flush=True)

    def resume(self, job: Job, written: tuple[Ending, Resumption]) -> None:
        """Resumes a job after a checkpoint of a whole run, and compares the rest; raises SystemExit if it fails."""
        whole, origin = written
        ending = run_in_threads(job, origin=origin)
        if ending.outcome != "finished":
            raise SystemExit(f"a resumed run has {ending.outcome}: {ending.error}")
        found, known = ending.view.run_state, whole.view.run_state
        rest = [row for row in known.rows if row.step > origin.step]
        late = {step: each for step, each in known.validations.items() if step > origin.step}
        self.resumed += 1
        self.rows += len(rest)
        self.wrong += first_difference(found.rows, rest) is not None or found.validations != late


def written(job: Job) -> Iterator[tuple[Ending, Resumption]]:
    """Yields the whole run of a job with a checkpoint of each step before the last."""
    with tempfile.TemporaryDirectory() as name:
        ending = run_in_threads(keeping_all(job, Path(name)))
        for origin in kept_states(job, ending, Path(name))[:-1]:
            yield ending, origin


def whole_stages(job: Job, count: Count) -> None:
    """Writes a job with each cut, and reads each step with each cut."""
    for cut in cuts(job.pipelines):
        for each in written(replace(job, **cut)):
            for read in cuts(job.pipelines):
                count.resume(replace(job, **read), each)
        count.tell()


def shards(count: Count) -> None:
    """Writes shards and reads whole stages and shards of another cut; writes whole stages and reads shards."""
    for model in MODELS.values():
        job = replace(model, pipelines=2)
        for each in written(replace(job, **_SHARDS, stages=2)):
            for read in cuts(2)[:3]:
                count.resume(replace(job, **read), each)
            count.resume(replace(job, **_SHARDS, stages=1), each)
        for each in written(replace(job, stages=3)):
            count.resume(replace(job, **_SHARDS, stages=2), each)
        count.tell()


def main() -> int:
    """Returns 0 if every resumed run is the rest of the whole run, 1 if one is not."""
    names = [f"{model}-x{pipelines}" for model in MODELS for pipelines in (1, 2)]
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.resume_grid")
    parser.add_argument("--only", action="append", choices=[*names, "fsdp"], metavar="NAME")
    only = parser.parse_args().only or [*names, "fsdp"]
    wrong = 0
    for name in only:
        count = Count(name)
        if name == "fsdp":
            shards(count)
        else:
            model, _, pipelines = name.partition("-x")
            whole_stages(replace(MODELS[model], pipelines=int(pipelines)), count)
        wrong += count.wrong
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

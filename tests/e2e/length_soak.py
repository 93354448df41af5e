"""``python -m tests.e2e.length_soak --kills 100 --seed 1``: real kills over streams of sequences of different lengths.

A round trains a stream and kills workers at drawn actions; then it resumes a checkpoint of that run on another number
of workers, with other kills. The weights of each step must be those of a plain loop, and the microbatches of the
committed steps, first of one run and then of the other, must have each sequence of the stream once per pass.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from engine.core.checks.trajectory import MARK_DIGITS, TrajectoryRow
from engine.core.job.job import Job
from engine.models.data_sources import open_data
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.worker.microbatches import mark_of
from tests.e2e.kill_forecast import SORTS, plan_kills
from tests.e2e.kill_runs import Runs
from tests.e2e.launcher import ROOT
from tests.e2e.plain_loop import train
from tests.e2e.stream_models import number_of
from tests.e2e.test_indexed_runs import loaded_marks
from tests.kills import parse_kills
from tests.runtime.kept_states import keeping_all, kept_states

MODELS, STREAM = "tests.e2e.length_models:", "tests.e2e.stream_models:"
NUMBER = 40  # sequences of a pass
FIELDS: dict[str, Any] = {
    **{"model": MODELS + "layers", "collate": STREAM + "collated", "variable_shapes": True, "data_args": {"count": 40}},
    **{"microbatches": 3, "microbatch_size": 2, "steps": 18, "validate_every": 0, "loss_normalisation": "tokens"},
}
DATA = ({"data": STREAM + "plain"}, {"data": STREAM + "Stateful"}, {"data": STREAM + "buckets", "collate": ""})
CUTS: tuple[dict[str, Any], ...] = (
    {"stages": 5},
    {"stages": 4, "redundancy": "eager"},
    {"stages": 3, "redundancy_level": 2},
    {"stages": 2, "blocks": 2},
)


@cache
def plain_rows(number: int) -> dict[int, list[Any]]:
    """Returns the rows of a plain loop over a kind of data, by step."""
    rows = train(Job(**FIELDS | DATA[number]))
    return {step: [row for row in rows if int(row[0]) == step] for step in range(FIELDS["steps"])}


def wrong(rows: list[TrajectoryRow], number: int) -> list[str]:
    """Returns what is not as in a plain loop: weights, the microbatches of a step, a sequence not trained once."""
    job = Job(**FIELDS | DATA[number])
    data, marks, trained = open_data(job), loaded_marks(rows), list[int]()
    problems = []
    for step in range(job.steps):
        if [row.texts()[:5] for row in rows if row.step == step] != plain_rows(number)[step]:
            problems.append(f"step {step} has other weights")
        for microbatch in range(job.microbatches):
            batch = data.microbatch(step, 0, microbatch, job.microbatch_size)
            mark, half = mark_of(batch), MARK_DIGITS // 2
            expected = mark[:half] + mark[MARK_DIGITS:][:half]
            # A death behind the votes may take the marks of its step with it; the weights are compared above.
            if (loaded := marks.get((step, f"microbatch {microbatch} of pipeline 0"), expected)) != expected:
                problems.append(f"step {step} has another microbatch {microbatch}: {loaded}, not {expected}")
            trained += map(number_of, batch.inputs[0])
    for first in range(0, len(trained) - NUMBER + 1, NUMBER):
        if set(Counter(trained[first : first + NUMBER]).values()) != {1}:
            problems.append(f"pass {first // NUMBER} has a sequence more than once")
    return problems


class SoakRound:
    """A run and its resumption, with kills in both; `kills` is the number of those that struck."""

    def __init__(self, runs: Runs, place: Path, seed: int):
        self._runs, self._place, self._seed = runs, place, seed
        self._random = random.Random(seed)  # noqa: S311 - the same seed makes the same round
        self.kills = 0

    def run(self) -> list[str]:
        """Returns the rules that broke."""
        number = self._seed % len(DATA)
        first, second = self._random.sample(CUTS, 2)
        job = keeping_all(Job(**FIELDS | DATA[number] | first), self._place)
        ending, problems = self._struck(job, 0)
        if problems:
            return problems
        origin = self._random.choice(kept_states(job, ending, self._place)[2:8])
        other = replace(Job(**FIELDS | DATA[number] | second), checkpoint_every="0")
        resumed, problems = self._struck(other, origin.step + 2, origin=origin)
        rows = [row for row in ending.view.run_state.rows if row.step <= origin.step]
        rows += [row for row in resumed.view.run_state.rows if row.step > origin.step]
        return problems + wrong(ending.view.run_state.rows, number) + wrong(rows, number)

    def _struck(self, job: Job, since: int, **options: Any) -> tuple[Any, list[str]]:
        """Runs a job with kills from a step on."""
        wanted = self._random.sample(SORTS, len(SORTS))
        texts = [kill.text for kill in plan_kills(job, wanted, self._seed) if kill.step >= since]
        ending, events = self._runs.run(job, parse_kills(texts, job), **options)
        self.kills += sum(event["event"] == "fault" for event in events)
        is_bad = ending.error is not None or ending.outcome != "finished"
        return ending, [f"{ending.outcome} with {texts}: {ending.error}"] * is_bad


def main() -> int:
    """Returns 0 if each run is as a plain loop, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.length_soak")
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first round's; each one has its own")
    given, kills = parser.parse_args(), 0
    os.environ["PYTHONPATH"] = str(ROOT)  # each job runs in its own folder
    with tempfile.TemporaryDirectory(prefix="length-soak-") as name, ForkServer() as server:
        runs = Runs(Path(name), server)
        for seed in count(given.seed):
            one = SoakRound(runs, Path(name) / f"kept-{seed}", seed)
            problems = one.run()
            kills += one.kills
            print(f"seed {seed}: {kills} kills", *problems, sep="\n  ", flush=True)
            if problems or kills >= given.kills:
                return int(bool(problems))
    raise AssertionError("seeds do not end")


if __name__ == "__main__":
    sys.exit(main())

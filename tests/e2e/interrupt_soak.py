"""``python -m tests.e2e.interrupt_soak``: Ctrl-C at some twenty moments of run, inject, matrix and twin.

Each command runs as a user starts it: on a terminal of its own, whose Ctrl-C goes to the foreground process group, or
without one, and then the signal goes to the launcher alone. It must answer within `ANSWER_S`, end within `END_S`, exit
with the right code and leave nothing. The times hold on an idle machine; `make test` runs a few moments without them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.e2e.launcher import Done, Launcher

ANSWER_S = 0.3
END_S = 2.0
ANSWER = "stopping; Ctrl-C again kills"
_POLL_S = 0.002
_WAIT_S = 60.0

_USER = "tests.e2e.user_models"
_RUN = ("run", "--model", "timed", "--stages", "3", "--microbatches", "4", "--validate-every", "0")
_STEP = ("--set", "model_args.forward_ms=2", "--set", "model_args.backward_ms=4")
_LONG = (*_RUN, "--steps", "5000", *_STEP)
# The twin of a run of this job takes two seconds.
_JOB = "model: timed, stages: 3, microbatches: 4, validate_every: 0, model_args: {forward_ms: 2, backward_ms: 4}"
_KILLED = (*_RUN, "--steps", "40", *_STEP, "--kill", "3:1")
_SCENARIO = f"""\
version: 1
name: killed
about: a kill, a recovery and a twin
job: {{{_JOB}, steps: 40}}
faults: [{{at: {{step: 3, stage: 1}}, do: kill}}]
expect: {{outcome: recovered, trajectory: identical, culprit: exact, leftovers: none}}
"""
_MATRIX = f"""\
version: 1
name: cells
about: quick cells, then one that goes on
job: {{{_JOB}, steps: 6}}
expect: {{outcome: recovered}}
cases:
  - {{name: first, faults: [{{at: {{step: 3, stage: 1}}, do: kill}}]}}
  - {{name: second, faults: [{{at: {{step: 3, stage: 1}}, do: kill}}]}}
  - {{name: long, job: {{steps: 5000}}, faults: [{{at: {{step: 3, stage: 1}}, do: kill}}]}}
"""
# The fork server imports the module of a model before any worker starts; this one takes longer than a test may wait.
_SLOW_IMPORT = """\
import time

time.sleep(60)


def layers():
    raise NotImplementedError
"""
_INJECT = ("inject", "--scenario", "killed.yaml")
_CELLS = ("matrix", "cells.yaml", "--jobs", "1", "--junit", "cells.xml")

Look = Callable[[Launcher], object]


class Moment(NamedTuple):
    """A moment of a command: `has_come`, then `delay_s`; `told` is a part of the output to stdout."""

    arguments: tuple[str, ...]
    has_come: Look
    delay_s: float = 0.0
    told: str = ""
    times: int = 1  # how often the signal comes


class Outcome(NamedTuple):
    """The seconds from the signal to the answer and to the end, and all deviations from the rules."""

    answer_s: float
    end_s: float
    problems: tuple[str, ...]


def _at_launch(launcher: Launcher) -> bool:
    return True


def _at(kind: str, number: int = 1) -> Look:
    return lambda launcher: len(launcher.events(kind)) >= number


def _told(text: str) -> Look:
    return lambda launcher: text in launcher.stderr()


def _in_recovery(launcher: Launcher) -> bool:
    return any(event["verdict"] for event in launcher.events("epoch"))


def _in_twin(launcher: Launcher) -> bool:
    return any(b'"commit"' in path.read_bytes() for path in launcher.folder.glob("results/*/twin/events.jsonl"))


def _in_cell(launcher: Launcher) -> bool:
    # Only folders that stay are searched: a search of all fails when a store deletes one of its own meanwhile.
    runs = launcher.folder.glob("results/matrices/*/runs/*-long-*/events.jsonl")
    return any(b'"commit"' in path.read_bytes() for path in runs)


_TWIN = "not compared: interrupted in the twin"
MOMENTS = {
    "run, 0.05 s after its start": Moment(_LONG, _at_launch, 0.05),
    "run, 0.2 s after its start": Moment(_LONG, _at_launch, 0.2),
    "run, 0.35 s after its start": Moment(_LONG, _at_launch, 0.35),
    "run, 0.5 s after its start": Moment(_LONG, _at_launch, 0.5),
    "run, its first record": Moment(_LONG, _at("job"), told="interrupted: 0 steps"),
    "run, the fork server imports": Moment(
        (*_RUN, "--model", "slow_import:layers"), _at("job"), 0.4, "interrupted: 0 steps"
    ),
    "run, start of workers": Moment(_LONG, _at("started"), told="interrupted: 0 steps"),
    "run, trial of layers": Moment(
        (*_LONG, "--set", "model_args.forward_ms=300"), _at("partition"), 0.1, "interrupted: 0 steps"
    ),
    "run, first step": Moment(_LONG, _at("go"), told="interrupted: "),
    "run, a step": Moment(_LONG, _at("commit", 3), 0.01, "last committed step"),
    "run, a recovery": Moment((*_LONG, "--kill", "3:1", "--no-twin"), _in_recovery, told="last committed step"),
    "run, a layer that sleeps": Moment(
        (*_LONG, "--set", "model_args.backward_ms=60000"), _at("action"), 0.5, "interrupted: 0 steps"
    ),
    "run, a layer that loops": Moment(
        (*_RUN, "--model", f"{_USER}:loops", "--steps", "9"), _at("commit"), 0.5, "interrupted: 1 steps"
    ),
    "run, a layer that loops, two signals": Moment(
        (*_RUN, "--model", f"{_USER}:loops", "--steps", "9"), _at("commit"), 0.5, "interrupted: 1 steps", 2
    ),
    "run, start of the twin": Moment(_KILLED, _told("running the fault-free twin"), 0.1, _TWIN),
    "run, a step of the twin": Moment(_KILLED, _in_twin, 0.01, _TWIN),
    "inject, 0.4 s after its start": Moment(_INJECT, _at_launch, 0.4),
    "inject, start of workers": Moment(_INJECT, _at("started"), told="killed: interrupted"),
    "inject, a recovery": Moment(_INJECT, _in_recovery, told="killed: interrupted"),
    "inject, a step of the twin": Moment(_INJECT, _in_twin, 0.01, "killed: interrupted"),
    "matrix, start of a lane": Moment(_CELLS, _at_launch, 1.0),
    "matrix, between two cells": Moment(_CELLS, _told("[1/3]"), 0.0, "interrupted after 1 of 3 cells"),
    "matrix, a step of a cell": Moment(_CELLS, _in_cell, 0.1, "interrupted after 2 of 3 cells"),
}


def interrupt(
    moment: Moment, folder: Path, number: signal.Signals = signal.SIGINT, *, on_terminal: bool = False
) -> Outcome:
    """Runs a command until its moment, sends the signal, and judges the end."""
    launcher = Launcher(folder, moment.arguments, {}, on_terminal=on_terminal, files=_FILES)
    try:
        launcher.wait_until(lambda: moment.has_come(launcher), _WAIT_S)
        time.sleep(moment.delay_s)
        since_s, answer_s = time.monotonic(), float("inf")
        for _ in range(moment.times):
            launcher.interrupt(number)
            while launcher.process.poll() is None and time.monotonic() - since_s < _WAIT_S:
                if answer_s == float("inf") and ANSWER in launcher.stderr():
                    answer_s = time.monotonic() - since_s
                    if moment.times > 1:
                        break  # again
                time.sleep(_POLL_S)
        end_s = time.monotonic() - since_s
        if answer_s == float("inf") and ANSWER in launcher.stderr():
            answer_s = end_s
        done = launcher.wait(_WAIT_S)
        return Outcome(answer_s, end_s, (*_judged(launcher, done, moment, number), *_left(launcher)))
    finally:
        launcher.kill_all()


_FILES = {"killed.yaml": _SCENARIO, "cells.yaml": _MATRIX, "slow_import.py": _SLOW_IMPORT}


def _judged(launcher: Launcher, done: Done, moment: Moment, number: signal.Signals) -> list[str]:
    problems = []
    if done.code != 128 + number:
        problems.append(f"exit code {done.code}, not {128 + number}: {done.stderr[-1000:]}")
    if ANSWER not in done.stderr:
        problems.append(f"no answer: {done.stderr[-1000:]}")
    if moment.told not in done.stdout:
        problems.append(f"{moment.told!r} is not told: {done.stdout[-1000:]}")
    if "Traceback" in done.stderr or "is lost" in done.stdout + done.stderr:
        problems.append(f"an error or a loss is told: {done.stderr[-2000:]}{done.stdout[-1000:]}")
    if launcher.events("job") and not any(launcher.run_folder.glob("run.json")):
        problems.append("no run.json")
    ended = launcher.events("ended")
    if launcher.events("job") and (not ended or ended[-1]["outcome"] != "interrupted"):
        problems.append(f"the last record is {launcher.events()[-1]}")
    return problems


def _left(launcher: Launcher) -> list[str]:
    stores = [*launcher.folder.glob("results/*/logs/etcd"), *launcher.folder.glob("results/*/twin/logs/etcd")]
    return [f"left: {each}" for each in (*launcher.leftovers(), *stores)]


def soak(rounds: int, names: list[str], folder: Path) -> bool:
    """Interrupts each command at its moment, on a terminal and without one in turns; returns whether a rule broke."""
    failed, worst_answer_s, worst_end_s, count = False, 0.0, 0.0, 0
    for each in range(rounds):
        for place, name in enumerate(names):
            on_terminal = (each + place) % 2 == 0
            outcome = interrupt(MOMENTS[name], folder / f"{each}-{place}", on_terminal=on_terminal)
            problems = [*outcome.problems]
            problems += [f"answered after {outcome.answer_s:.2f} s"] if outcome.answer_s > ANSWER_S else []
            problems += [f"ended after {outcome.end_s:.2f} s"] if outcome.end_s > END_S else []
            where = "terminal" if on_terminal else "launcher alone"
            print(
                f"{outcome.answer_s:6.3f} s  {outcome.end_s:6.3f} s  {name} ({where})",
                *problems,
                sep="\n  ",
                flush=True,
            )
            failed = failed or bool(problems)
            worst_answer_s, worst_end_s = max(worst_answer_s, outcome.answer_s), max(worst_end_s, outcome.end_s)
            count += 1
            if not problems:
                shutil.rmtree(folder / f"{each}-{place}")
    print(f"{count} interrupts; slowest answer {worst_answer_s:.3f} s, slowest end {worst_end_s:.3f} s")
    return failed


def main() -> int:
    """Returns 0 if every command ended well, 1 if one did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.interrupt_soak")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--moment", default="", metavar="TEXT", help="only moments with this text in their name")
    given = parser.parse_args()
    os.environ["TERM"] = "xterm"
    folder = Path(tempfile.mkdtemp(prefix="interrupt-soak-"))
    failed = soak(given.rounds, [name for name in MOMENTS if given.moment in name], folder)
    if failed:
        print(f"what they wrote is in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

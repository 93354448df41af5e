"""Runs jobs with real kills and their fault-free twins, and returns all deviations from the forecast.

Rule: the death of a victim, its signal and its action are all read from the events of the run.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.checkpoint_rules import Resumption
from engine.core.faults.fault import Fault
from engine.core.job.job import Job
from engine.runtime.agent.run_state import Ending, RunState
from engine.runtime.agent.session import run_session
from engine.runtime.process.spawner import Spawner
from tests.e2e.kill_forecast import Kill, in_one_stage
from tests.e2e.recorded import events_of
from tests.kills import parse_kills

Event = dict[str, Any]

_MLP = {"model": "mlp", "model_args": {"width": 16, "depth": 5, "dropout": 0.1}, "stages": 6, "microbatches": 4}
_TIED = {"model": "gpt", "model_args": {"width": 16, "heads": 2, "tied": True}, "stages": 5, "microbatches": 3}
_BATCH_NORM = {"model": "resnet18", "model_args": {"width": 8}, "stages": 5, "microbatches": 3}
_KINDS = {"model": "tests.e2e.state_models:all_kinds", "stages": 5, "microbatches": 4, "validate_every": 4}
_TWO = {"stages": 3, "pipelines": 2, "microbatches": 3}

# Small jobs with steps of milliseconds; each survives the deaths of almost all workers, one after the other.
SETTINGS: dict[str, dict[str, Any]] = {
    "mlp-lazy": {**_MLP},
    "mlp-lazy-2": {**_MLP, "redundancy_level": 2},
    "mlp-eager": {**_MLP, "redundancy": "eager"},
    "mlp-eager-2": {**_MLP, "redundancy": "eager", "redundancy_level": 2},
    "gpt-lazy": {**_TIED},
    "gpt-eager-2": {**_TIED, "redundancy": "eager", "redundancy_level": 2},
    "resnet18-lazy": {**_BATCH_NORM},
    "resnet18-eager": {**_BATCH_NORM, "redundancy": "eager"},
    "mlp-lazy-x2": {**_MLP, **_TWO},
    "mlp-eager-x2": {**_MLP, **_TWO, "redundancy": "eager"},
    "mlp-reroute-x2": {**_MLP, **_TWO, "redundancy": "reroute"},
    "mlp-none-x2": {**_MLP, **_TWO, "redundancy": "none"},
    "gpt-lazy-x2": {**_TIED, **_TWO},
    "gpt-reroute-x2": {**_TIED, **_TWO, "redundancy": "reroute"},
    "resnet18-eager-x2": {**_BATCH_NORM, **_TWO, "redundancy": "eager"},
    "resnet18-none-x2": {**_BATCH_NORM, **_TWO, "redundancy": "none"},
    "mlp-shards-x2": {**_MLP, **_TWO, "fsdp": 1},
    "gpt-shards-x2": {**_TIED, **_TWO, "stages": 2, "fsdp": 1, "log_every": 1},
    "resnet18-shards-x2": {**_BATCH_NORM, **_TWO, "stages": 2, "fsdp": 1},
    "mlp-shards-x4": {**_MLP, "stages": 2, "pipelines": 4, "fsdp": 1},
    "kinds-lazy": {**_KINDS},
    "kinds-eager-streamed": {**_KINDS, "redundancy": "eager", "log_every": 1},
    "kinds-reroute-x2": {**_KINDS, **_TWO, "redundancy": "reroute"},
    "kinds-none-x2": {**_KINDS, **_TWO, "redundancy": "none"},
}


def job_of(setting: str) -> Job:
    """Returns the job of a setting; it has enough steps for the deaths of all workers but one."""
    return Job(**{"microbatch_size": 2, "steps": 18, "validate_every": 0, "check_pure": False, **SETTINGS[setting]})


class Runs:
    """Runs jobs with one fork server, each in its own folder, and keeps the outcome of each twin."""

    def __init__(self, folder: Path, server: Spawner):
        self._folder = folder
        self._server = server
        self._twins: dict[str, tuple[object, ...]] = {}
        self._count = 0

    @property
    def last(self) -> Path:
        """The folder of the last run."""
        return self._folder / str(self._count)

    @property
    def next(self) -> Path:
        """The folder of the next run."""
        return self._folder / str(self._count + 1)

    @property
    def requests(self) -> Path:
        """The folder in which the launchers of all runs look for requests."""
        return self._folder

    def run(
        self, job: Job, faults: Sequence[Fault] = (), origin: Resumption | None = None, **fields: Any
    ) -> tuple[Ending, list[Event]]:
        """Returns the ending of a job with other values of some fields, and its events."""
        self._count += 1
        folder = self.last
        folder.mkdir()
        events = folder / "events.jsonl"
        job = replace(job, **fields)
        ending = run_session(job, events, folder, faults=faults, server=self._server, origin=origin)
        return ending, events_of(events)

    def twin(self, job: Job) -> tuple[object, ...]:
        """Returns the outcome of a job without deaths, redundancy and transfers between stages."""
        job = in_one_stage(job)
        if repr(job) not in self._twins:
            ending, _ = self.run(job)
            assert ending.error is None, ending.error
            self._twins[repr(job)] = outcome_of(ending.view.run_state)
        return self._twins[repr(job)]

    def strike(self, job: Job, kills: Sequence[Kill], second: Fault | None = None) -> list[str]:
        """Runs a job with kills, and perhaps a second fault; returns all deviations."""
        twin = self.twin(job)
        faults = (*parse_kills([kill.text for kill in kills], job), *([second] if second else ()))
        ending, events = self.run(job, faults)
        victims = {event["of"] for event in events if event["event"] == "fault"}
        return [*differences(ending, twin), *not_as_forecast(kills, events), *lives(events, victims)]


def outcome_of(run_state: RunState) -> tuple[object, ...]:
    """Returns the values that a death must not change: hashes of each layer after each step, losses, validations."""
    return tuple(run_state.rows), tuple(run_state.losses), dict(run_state.validations)


def differences(ending: Ending, twin: tuple[object, ...]) -> Iterator[str]:
    """Yields the differences between the ends of a run and its twin."""
    if ending.error is not None or ending.outcome != "finished":
        yield f"{ending.outcome}: {ending.error}"
    for name, mine, its in zip(("rows", "losses", "validations"), outcome_of(ending.view.run_state), twin, strict=True):
        if mine != its:
            yield f"the {name} differ from those of the twin"


def not_as_forecast(kills: Sequence[Kill], events: Sequence[Event]) -> Iterator[str]:
    """Yields the kills that did not strike, struck another worker, or struck at another action."""
    struck = {event["fault"]: event["of"] for event in events if event["event"] == "fault"}
    for kill in kills:
        if struck.get(kill.text) != kill.worker:
            yield f"{kill.text} struck {struck.get(kill.text)}, not worker {kill.worker}"
            continue
        done = tuple(actions_of(events, kill.worker, kill.step))
        if done != kill.done:
            yield f"{kill.text}: worker {kill.worker} had done {' '.join(done)}, not {' '.join(kill.done)}"
    yield from (f"{event['fault']}: {event['how']}" for event in events if event["event"] == "unconfirmed")


def lives(events: Sequence[Event], victims: Collection[int]) -> Iterator[str]:
    """Yields the workers that started twice, wrote as another process, ended in the wrong way, or still run."""
    started = [(event["of"], event["child"]) for event in events if event["event"] == "started"]
    pids = dict(started)
    if len(started) != len(pids):
        yield f"started more than once: {started}"
    spoke = {(event["worker"], event["pid"]) for event in events if event["worker"] >= 0}
    yield from (f"worker {worker} spoke as {pid}" for worker, pid in sorted(spoke) if pids[worker] != pid)
    codes = Counter((event["of"], event["code"]) for event in events if event["event"] == "exit")
    due = Counter((worker, -signal.SIGKILL if worker in victims else 0) for worker in pids)
    if codes != due:
        yield f"ended as {sorted(codes.elements())}, not as {sorted(due.elements())}"
    yield from (f"worker {worker} is there still" for worker, pid in pids.items() if os.path.exists(f"/proc/{pid}"))


def actions_of(events: Sequence[Event], worker: int, step: int) -> Iterator[str]:
    """Yields the actions of a step that a worker has recorded."""
    for event in events:
        if event["event"] == "action" and event["worker"] == worker and event["step"] == step:
            yield event["action"]

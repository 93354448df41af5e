"""The handle of a run that a program has started.

Rules: it reads the records of the run, as reports do, so that both say the same. The run ends with the process that
holds the handle. A Ctrl-C during `wait` stops the run in an orderly way, and is raised again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from engine.api.callbacks import Callback, Callbacks
from engine.api.errors_of_runs import error_of
from engine.api.result import TrainingResult, result_of
from engine.core.errors import NothingMatchedError, Problem, UserError, nearest
from engine.core.history.record import Record
from engine.files.growing_events import GrowingEvents
from engine.files.run_folder import RunFolder
from engine.observers.observers import DRAIN_S

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from engine.api.child import RunChild
    from engine.core.config.job import Job
    from engine.core.faults.scenario import Scenario
    from engine.core.history.run_history import RunHistory
    from engine.core.membership.run_status import RunStatus
    from engine.files.scenarios.scenario_file import Loaded

_POLL_S = 0.1


class TrainingRun:
    """A run that goes on, or has ended; as a context manager, it waits for the run, or stops it after an error."""

    def __init__(self, child: RunChild, folder: Path, callbacks: Sequence[Callback] = ()):
        self.folder = folder
        self._child = child
        self._files = RunFolder(folder)
        self._result: TrainingResult | None = None
        self._callbacks = Callbacks(callbacks, self._files.events, lambda: child.is_over)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            self.stop()

    def __repr__(self) -> str:
        state = "goes on" if self.result is None else self.result.outcome
        return f"<TrainingRun {self.name}: {state}>"

    @property
    def name(self) -> str:
        """The name of the run's folder, which `bamboo report` and the other commands take."""
        return self.folder.name

    @property
    def job(self) -> Job:
        """The job of the run with all its fields; the values of secret arguments are masked."""
        return self._events().read_on().job

    @property
    def result(self) -> TrainingResult | None:
        """The result of the run; None while it goes on."""
        if self._result is None and self._child.is_over:
            self._result = result_of(self.folder, self._child.word())
        return self._result

    def wait(self, timeout_s: float | None = None, *, check: bool = True) -> TrainingResult:
        """Waits for the end of the run, and returns its result.

        Raises:
            BambooError: the run ended with another exit code than 0, unless `check` is false; the class tells why.
            TimeoutError: the run goes on after `timeout_s`.
        """
        try:
            has_ended = self._child.wait(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            raise
        if not has_ended:
            raise TimeoutError(f"the run {self.name} goes on after {timeout_s:g} s")
        self._callbacks.join(DRAIN_S)
        result = self.result
        if result is None:
            raise NothingMatchedError(f"the run {self.name} left no result")
        if check and result.exit_code:
            raise error_of(result.plain)
        return result

    def stop(self) -> TrainingResult:
        """Ends the run as Ctrl-C does: the open step is finished. Returns its result; raises no error of the run."""
        self._child.stop()
        return self.wait(check=False)

    def status(self) -> RunStatus:
        """Returns the phase of the run, its last step and loss, the owners of its stages and the verdicts so far."""
        from engine.core.history.recorded_status import status_of_history
        from engine.files.step_reader import StepReader

        history = self._events(last_commits=True).read_on()
        history.last_action |= StepReader(self.folder).last_actions({})
        return status_of_history(self.name, history)

    def events(self, *, follow: bool = False) -> Iterator[Record]:
        """Yields the records of the run so far, in their order; with `follow`, until its end."""
        growing = self._events()
        while True:
            is_over = self._child.is_over
            yield from growing.news()
            if is_over or not follow:
                return
            time.sleep(_POLL_S)

    def table(self, name: str) -> pd.DataFrame:
        """Returns a table of the run: the same as `bamboo report --table NAME`; raises UserError for another name."""
        from engine.files.events_file import read_history
        from engine.files.evidence.proving import proof_of
        from engine.report.actions import MOST_ACTIONS
        from engine.report.load import PROVED, TABLES, load

        if name not in TABLES:
            raise UserError([Problem("table", f"one of {', '.join(TABLES)}", repr(name), nearest(name, TABLES))])
        is_whole = name == "actions"
        history = read_history(self._files.events)
        proof = {"proof": proof_of(self._files, history)} if name in PROVED else {}  # it reads every file of the run
        return load(history, self.name, None if is_whole else MOST_ACTIONS, **proof).table(name)

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the state_dict in the newest checkpoint of the run, or in that of a step.

        Raises:
            NothingMatchedError: there is no such checkpoint (yet).
            StorageError: none is good.
        """
        from engine.api.weights import weights_at

        return weights_at(self.folder, step)

    def kill(self, worker: int) -> dict[str, Any]:
        """Kills a worker by SIGKILL as soon as it computes; returns the case when the run has recovered, or ended.

        The case has the verdict, the checks and the recoveries, as `bamboo inject --json` prints them.

        Raises:
            UserError: there is no such worker, or it owns no stage.
            BambooError: the run has ended, or takes no faults.
        """
        from engine.core.faults.kill_text import kill_scenario

        history = self._in_training()
        slots = sorted(slot for slot, owner in history.owners.items() if owner == worker)
        if not slots:
            expected = f"one of {', '.join(map(str, sorted(set(history.owners.values()))))}"
            raise UserError([Problem("worker", expected, repr(worker), "the workers that own a stage now")])
        pipeline, stage = slots[0]
        return self._inject(_of(kill_scenario([f"0:{stage}@{pipeline}"], history.job)))

    def inject(self, scenario: str, *, seed: int | None = None, settings: Iterable[str] = ()) -> dict[str, Any]:
        """Injects the faults of a scenario, as `bamboo inject SCENARIO --run` does; returns the case as `kill` does."""
        self._in_training()
        from engine.files.scenarios.scenario_file import load_scenario
        from engine.harness.job_checks import findable
        from engine.runtime.faults.registry import kinds

        return self._inject(load_scenario(scenario, kinds(), seed, settings, findable))

    def _in_training(self) -> RunHistory:
        """Waits until training has begun, and returns the history of the run; raises NothingMatchedError at its end."""
        growing = self._events()
        while not (history := growing.read_on()).is_training:
            if self._child.is_over:
                raise NothingMatchedError(f"the run {self.name} has ended")
            time.sleep(_POLL_S)
        return history

    def _inject(self, loaded: Loaded) -> dict[str, Any]:
        from engine.harness.attach import attach

        return attach(loaded, self._files, lambda line: None).as_dict()

    def _events(self, *, last_commits: bool = False) -> GrowingEvents:
        return GrowingEvents(self._files.events, last_commits=last_commits)


def _of(scenario: Scenario) -> Loaded:
    """Returns a scenario that no file has."""
    from engine.files.scenarios.scenario_file import Loaded
    from engine.files.scenarios.scenario_job import JobSource

    return Loaded(Path("kill"), scenario, scenario.job.seed, (), JobSource(), {})

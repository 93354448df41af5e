"""A case: a run to make from a scenario file or from options, the name of its folder, and the facts stored there.

Rule: a run folder has everything needed to run the case again.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from engine.core.checkpoint_rules import Resumption
from engine.core.checks.expectations import (
    Check,
    Observation,
    check,
    decided,
    exit_code,
    strike_accuracy,
    verdict,
    why_not_struck,
)
from engine.core.checks.recoveries import Recovery, Stall, quantile
from engine.core.errors import BY_SIGNAL, BambooError, ExitCode, RepeatedExceptionError, UserCodeError
from engine.core.faults.fault import Fault, to_plain
from engine.core.faults.scenario import Scenario, scenario_plain
from engine.core.history.process_records import CheckRecord, ComparisonRecord, EndedRecord, Result, VerdictRecord
from engine.core.history.run_records import ConfirmedRecord, RaisedRecord, ScenarioRecord, StampedRecord
from engine.core.hosts.notice_answer import NoticeFrom
from engine.core.job.hugging_face import MODEL
from engine.core.job.job import Job

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import ResolvedJob
    from engine.files.jobs.scenario_file import LoadedScenario


_MOST_OF_NAME = 1_000  # characters of a text that are used for a folder's name


@dataclass(frozen=True, slots=True)
class Case:
    """A run to make: a scenario and its concrete faults.

    `name` is a part of the folder's name, `origins` has the source of each value of the job, `file` is the scenario
    file, and an `injectable` run accepts the faults of `bamboo inject --run`. It starts from the checkpoint `origin`.
    The initial weights must have the hash `init`, if it is not empty. `notices` is where to ask for notices. `run_id`
    is the name of the run in the store, by default that of its folder. `begun_as` is the name of the folder in which it
    began, on another host, which is also that of its checkpoints.
    """

    name: str
    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    file: LoadedScenario | None = None
    grace_s: float = 120.0
    injectable: bool = True
    origin: Resumption | None = None
    init: str = ""
    notices: NoticeFrom | None = None
    run_id: str = ""
    begun_as: str = ""


def folder_name(text: str, otherwise: str) -> str:
    """Returns text as part of a folder's name: up to 40 of a-z 0-9 . _ - without accents, or `otherwise`."""
    plain = unicodedata.normalize("NFKD", text[:_MOST_OF_NAME]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9._-]+", "-", plain).strip("-._")[:40] or otherwise


def case_of_file(loaded: LoadedScenario) -> Case:
    """Returns the case of a scenario file."""
    return Case(folder_name(loaded.scenario.name, "case"), loaded.scenario, loaded.faults, loaded.origins, file=loaded)


def whole_text(loaded: LoadedScenario) -> str:
    """Returns the text of a scenario including its job, without secret values; a job from another file may change."""
    from engine.files.jobs.library import scenario_text

    job = loaded.scenario.job.masked
    if loaded.source.is_whole and job == loaded.scenario.job and loaded.path.is_file():  # a cell of a matrix has none
        return loaded.path.read_text(encoding="utf-8")
    usual = replace(job, results=Job().results)  # a folder of this run is not part of the scenario
    head = "" if loaded.source.is_whole else f"# {loaded.path}, with its job: {loaded.job_from}\n"
    return head + scenario_text(scenario_plain(replace(loaded.scenario, job=usual)))


def scenario_record(loaded: LoadedScenario, text: str) -> ScenarioRecord:
    """Returns the record with everything needed to run the scenario again; `text` is as it was at the start."""
    from engine.files.jobs.library import library

    name = loaded.scenario.name
    is_shipped = loaded.path == library() / f"{name}.yaml"
    return ScenarioRecord(
        scenario=name if is_shipped and loaded.source.is_whole else "scenario.yaml",
        text=text,
        seed=loaded.seed,
        settings=loaded.settings_but_results,
        needs_trust=bool(loaded.foreign),
    )


def case_of_job(resolved: ResolvedJob, scenario: Scenario, **options: Any) -> Case:
    """Returns the case of a job of the command line; `options` are fields of a case."""
    from engine.core.faults.expansion import expand

    job = resolved.job
    model = str(job.model_args.get("path", "")) if job.model == MODEL else job.model.rpartition(":")[2]
    name = job.name or folder_name(PurePath(model).name.replace("_", "-"), "model")
    options |= {"origin": resolved.origin, "init": resolved.init}
    return Case(name, scenario, expand(scenario, job.seed), resolved.origins, **options)


def facts_text(case: Case, run: str, result: dict[str, Any] | None = None) -> str:
    """Returns the text of `run.json` in the folder `run`, with the result of the case once it is known."""
    from engine.core.job.bit_fields import fingerprint_of
    from engine.files.host_facts import host_facts
    from engine.files.run_folder import run_json_text
    from engine.files.trajectory_file import own_sources

    facts: dict[str, Any] = {
        "run": case.begun_as or run,
        "job": asdict(case.scenario.job.masked),
        "fingerprint": fingerprint_of(case.scenario.job),
        "origins": case.origins,
        "injectable": case.injectable,
        "host": host_facts(Path.cwd()),
        "sources": own_sources(),
    }
    if case.init:
        facts["init"] = {"file": case.scenario.job.init, "sha256": case.init}
    if case.origin is not None:
        facts["resumed"] = asdict(case.origin)
    if case.file is not None:
        facts["scenario"] = {
            "name": case.scenario.name,
            "file": str(case.file.path),
            "job": case.file.job_from,
            "seed": case.file.seed,
            "settings": case.file.settings_but_results,
            "needs_trust": bool(case.file.foreign),
            "faults": [to_plain(fault) for fault in case.faults],
        }
    elif case.faults:
        facts["kill"] = [fault.id for fault in case.faults]
    return run_json_text(facts | {"result": result})


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case; `is_scenario`: of `bamboo inject`, whose exit code is that of the case, not of the run."""

    folder: Path
    faults: tuple[Fault, ...]
    observation: Observation
    checks: tuple[Check, ...]
    exit_code: ExitCode
    recoveries: tuple[Recovery, ...]
    run_error: BambooError | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    is_scenario: bool = False

    @property
    def verdict(self) -> Result:
        """The verdict over all checks."""
        return verdict(self.checks)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run or its twin; then the checks are those that could be made."""
        return self.exit_code in BY_SIGNAL

    @property
    def verdict_word(self) -> str:
        """The verdict, or ``interrupted``."""
        return "interrupted" if self.is_interrupted else self.verdict

    @property
    def error(self) -> BambooError | None:
        """The error that ended the run, or the first check that failed; None if all passed, or after a signal."""
        if self.run_error is not None or self.observation.exit_code or self.verdict == "passed" or self.is_interrupted:
            return self.run_error
        text = next(each.text for each in self.checks if each.result == self.verdict)
        if self.verdict == "invalid":
            text = f"the case is invalid, nothing was proved: {text}"
        return BambooError(text, self.exit_code)

    def may_go_on(self, steps: int) -> bool:
        """Returns whether some of the `steps` are left to train, and no comparison has found the weights wrong."""
        twin = self.observation.twin
        is_wrong = isinstance(twin, ComparisonRecord) and twin.difference is not None
        return self.summary["steps"] < steps and not self.summary.get("stopped_early") and not is_wrong

    def recovery_lines(self) -> list[str]:
        """Returns one line per recovery; it says if a comparison with the twin proved identical weights."""
        if isinstance(self.run_error, UserCodeError):
            return []  # every worker would have raised it: no worker could take over
        recoveries = self.recoveries
        if isinstance(self.run_error, RepeatedExceptionError):  # it tells of the workers that could not take over
            recoveries = tuple(each for each in recoveries if each.resume_ns is not None)
        twin, proved = self.observation.twin, ""
        if isinstance(twin, ComparisonRecord) and twin.difference is None and twin.compared:
            is_last = twin.last_step == self.summary["steps"] - 1
            proved = ", weights identical" + ("" if is_last else f" up to step {twin.last_step}")
        return [f"{each}{proved if each.resume_ns is not None or each.after_end else ''}" for each in recoveries]

    def exceptions(self) -> tuple[str, ...]:
        """Returns in words the exceptions in workers that no fault raised."""
        history = self.observation.history
        injected = {record.how for record in history.of(ConfirmedRecord)}
        return tuple(
            f"worker {record.of} {record.exception.in_step(record.step)}"
            for record in history.of(RaisedRecord)
            if f"raised: {record.error}" not in injected and not record.exception.is_injected
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the case as plain values."""
        return {
            "run_dir": str(self.folder),
            "verdict": self.verdict_word,
            "exit_code": int(self.exit_code),
            "checks": [asdict(result) for result in self.checks],
            "recoveries": [recovery.as_dict() for recovery in self.recoveries],
            "exceptions": self.exceptions(),
        }

    @property
    def ended(self) -> EndedRecord:
        """The end of the command: its outcome in one word, and its exit code."""
        is_own = self.error is not None and self.error is not self.run_error  # training finished, and a check failed
        if self.is_scenario or is_own or self.is_interrupted:
            return EndedRecord(outcome=self.verdict_word, exit_code=int(self.exit_code))
        return EndedRecord(outcome=self.summary["outcome"], exit_code=self.summary["exit_code"])

    def records(self, request: str = "") -> Iterator[StampedRecord]:
        """Yields the checks and the verdict as records of the run, or of a request to it."""
        for result in self.checks:
            yield CheckRecord(name=result.name, result=result.result, text=result.text, request=request)
        yield VerdictRecord(result=self.verdict, exit_code=self.ended.exit_code, request=request)

    def to_plain(self) -> dict[str, Any]:
        """Returns the summary of the run with the outcome and exit code of the command, for `run.json`."""
        ended = self.ended
        summary = {**self.summary, "outcome": ended.outcome, "exit_code": ended.exit_code}
        if self.is_scenario:
            return {**summary, "case": self.as_dict()}
        twin: dict[str, Any] | None = None
        if isinstance(self.observation.twin, ComparisonRecord):
            difference = None if self.observation.twin.difference is None else str(self.observation.twin.difference)
            twin = {"steps_compared": self.observation.twin.compared, "difference": difference}
        elif self.observation.twin is not None:
            twin = {"error": str(self.observation.twin)}
        return {
            **summary,
            "error": None if self.error is None else str(self.error),
            # An interrupted long run is not read again.
            "recoveries": None if self.observation.history.is_empty else [each.as_dict() for each in self.recoveries],
            "exceptions": self.exceptions(),
            "faults": [
                {"fault": fault.id, "fired": not why_not_struck(fault, self.observation)} for fault in self.faults
            ],
            "twin": twin,
        }


def judged(scenario: Scenario, faults: tuple[Fault, ...], folder: Path, observation: Observation) -> CaseResult:
    """Returns the result of a case: the checks of its expectations, and of the actions at which its faults struck."""
    from engine.runtime.faults.registry import kinds

    checks = check(scenario.expect, scenario.job, faults, kinds(), observation)
    checks = (*checks, *strike_accuracy(scenario.job, faults, observation.history))
    code = exit_code(checks, observation)
    checks = decided(checks, observation) if code in BY_SIGNAL else checks
    return CaseResult(folder, faults, observation, checks, code, tuple(observation.recoveries))


def stall_figures(results: Sequence[CaseResult]) -> dict[str, Stall]:
    """Returns p50, p95 and max of the stalls of training in some cases, without unfinished recoveries."""
    recoveries = [recovery for case in results for recovery in case.recoveries if recovery.resume_ns is not None]
    stalls = [recovery.stall for recovery in recoveries if recovery.stall]
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0} if stalls else {}
    return {name: quantile(stalls, part) for name, part in parts.items()}

"""`bamboo bench referee`: the shipped scenarios on one small job in each system that is installed, as one table.

Rules: a system trains the same model on the same samples, by a script of its own in `scenarios/external/jobs`. Its twin
is the same command without faults. What is not installed, or does not run without faults, is a row with the reason.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.core.checks.external_report import ExternalRun, external_checks
from engine.core.checks.external_verdict import judge
from engine.core.faults.external import ExternalScenario
from engine.core.faults.launchers import LAUNCHERS
from engine.core.texts import numbered
from engine.external.kinds import external_kinds
from engine.external.referee import JOB_FOLDER, Referee
from engine.files.atomic_write import make_folder
from engine.files.host_facts import installed_version
from engine.files.jobs.external_file import load_external
from engine.files.jobs.library import EXTERNAL_FOLDER, library
from engine.files.strict_yaml import read_yaml
from engine.runtime.faults.registry import kinds
from engine.runtime.process.interrupts import Interrupts

SCENARIOS = ("kill", "terminate", "stop", "kill-in-checkpoint", "kill-twice")
_JOBS = library() / EXTERNAL_FOLDER / "jobs"
_MOST_REASON = 200
# Else torch 2.13 starts ranks anew with the store of the dead ones, where gloo may read an old address.
_OWN_STORE = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m")
_TWO_RANKS = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")


@dataclass(frozen=True, slots=True)
class System:
    """One system: its `package`, whose version is told, its row of the launchers, the words before its script."""

    package: str
    launcher: str
    words: tuple[str, ...]
    script: str

    @property
    def command(self) -> tuple[str, ...]:
        """The command; `{folder}` in it is the job's own."""
        return (*self.words, str(_JOBS / self.script), "{folder}")


_TORCHRUN = (*_OWN_STORE, "torch.distributed.run", *_TWO_RANKS)
_ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --max_restarts 3"
_NVRX = (*_TWO_RANKS, "--ignore-missing-fault-tol-cfg")
_PYTHON = (sys.executable,)

SYSTEMS = {
    "bamboo": System("bamboo-train", "bamboo", _PYTHON, "bamboo_job.py"),
    "torchrun": System("torch", "torchrun", _TORCHRUN, "ddp_job.py"),
    "torchft": System("torchft", "torchft", _PYTHON, "torchft_job.py"),
    "nvrx": System(
        "nvidia-resiliency-ext",
        "nvrx",
        (*_OWN_STORE, "nvidia_resiliency_ext.fault_tolerance.launcher", *_NVRX),
        "ddp_job.py",
    ),
    "nvrx-inprocess": System("nvidia-resiliency-ext", "nvrx-inprocess", _PYTHON, "nvrx_job.py"),
    "deepspeed": System(
        "deepspeed",
        "deepspeed",
        (*_PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"),
        "deepspeed_job.py",
    ),
    "lightning": System("lightning", "torchrun", _TORCHRUN, "lightning_job.py"),
    "accelerate": System(
        "accelerate",
        "accelerate",
        (*_OWN_STORE, "accelerate.commands.launch", *_ACCELERATE.split()),
        "accelerate_job.py",
    ),
    "ray": System("ray", "ray", _PYTHON, "ray_job.py"),
}


@dataclass(frozen=True, slots=True)
class RefereeRow:
    """One scenario on one system; a figure that was not seen is None.

    `stall_ms` is how long training stood in all, `lost` counts steps that not every rank has in the end, `repeated`
    those done more than once; ranks were `struck`, and `blamed` by the system.
    """

    system: str
    version: str
    scenario: str
    outcome: str
    stall_ms: float | None = None
    lost: int | None = None
    repeated: int | None = None
    bits: str = ""
    struck: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()
    why: str = ""
    command: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as plain values."""
        return asdict(self)

    @property
    def blame(self) -> str:
        """The blamed ranks beside the truth, in words."""
        if self.blamed == self.struck:
            return f"right: {numbered('rank', self.struck, ' and ')}" if self.struck else ""
        blamed = numbered("rank", self.blamed, " and ") if self.blamed else "none"
        return f"{blamed}, struck {numbered('rank', self.struck, ' and ') if self.struck else 'none'}"


COLUMNS = tuple(each.name for each in fields(RefereeRow))


def referee_rows(
    systems: Sequence[str], case: str, repeats: int, folder: Path, interrupts: Interrupts, say: Callable[[str], object]
) -> Iterator[RefereeRow]:
    """Yields the rows of systems and scenarios that contain `case`, each run so often; ends after a signal."""
    for name in systems:
        system = SYSTEMS[name]
        release = installed_version(system.package) or installed_version(f"{system.package}-nightly")
        if not release:
            why = f"not installed: pip install {system.package}"
            yield RefereeRow(name, "", "", "not run", why=why, command=_told(system))
            continue
        rows = _Rows(name, system, release, folder / name, interrupts)
        for row in rows.all([each for each in SCENARIOS if case in each], repeats, say):
            if interrupts.first is not None:
                return
            yield row


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one system."""

    name: str
    system: System
    release: str
    folder: Path
    interrupts: Interrupts

    def all(self, names: Sequence[str], repeats: int, say: Callable[[str], object]) -> Iterator[RefereeRow]:
        scenarios = [_scenario(each, self.system) for each in names]
        say(f"{self.name}: without faults")
        twin = self._run("without-faults", replace(scenarios[0], faults=()))
        if twin.end.why != "exit" or twin.end.code:
            why = "did not end in time" if twin.end.why == "timeout" else f"ended with {twin.end.code}"
            why = f"{why} without faults: {self._last_words('without-faults')}"
            yield self._row("", "not run", why=why)
            return
        for number in range(repeats):
            for name, scenario in zip(names, scenarios, strict=True):
                say(f"{self.name}: {name}")
                place = f"{name}-{number}" if number else name
                yield self._judged(name, place, scenario, self._run(place, scenario), twin)

    def _row(self, scenario: str, outcome: str, **others: Any) -> RefereeRow:
        return RefereeRow(self.name, self.release, scenario, outcome, command=_told(self.system), **others)

    def _run(self, name: str, scenario: ExternalScenario) -> ExternalRun:
        folder = self.folder / name
        make_folder(folder / "logs", folder.parents[1])
        try:
            return Referee(scenario, external_kinds(kinds()), folder, str).run(self.interrupts)
        finally:
            shutil.rmtree(folder / JOB_FOLDER)  # checkpoints

    def _judged(
        self, name: str, place: str, scenario: ExternalScenario, run: ExternalRun, twin: ExternalRun
    ) -> RefereeRow:
        evidence = judge(run.reports, twin.reports, run.strikes_ns)
        checks = {each.name: each for each in external_checks(scenario, run, evidence)}
        recoveries = run.recoveries()
        if checks["faults"].result != "passed":
            return self._row(name, "not struck", why=checks["faults"].text)
        has_recovered = checks["outcome"].result == "passed" and evidence.status("survival") == "same"
        stalls = [each.stall.least_ns / 1e6 for each in recoveries if each.stall and each.resume_ns is not None]
        first = evidence.first_different_step
        weights = evidence.status("weights")
        figures: dict[str, Any] = {}
        if has_recovered:
            figures = {"lost": len(evidence.lost_steps), "repeated": len(evidence.repeated)}
            figures |= {"bits": f"other from step {first}" if weights == "different" else weights}
        why = [] if has_recovered else [checks["outcome"].text, self._last_words(place)]
        why += [f"left behind: {checks['leftovers'].text}"] * (checks["leftovers"].result == "failed")
        return self._row(
            name,
            "recovered" if has_recovered else "failed",
            stall_ms=round(sum(stalls), 1) if stalls and len(stalls) == len(recoveries) else None,
            struck=tuple(sorted({rank for each in recoveries for rank in each.struck})),
            blamed=tuple(sorted({rank for each in recoveries for rank in each.blamed})),
            why="; ".join(why),
            **figures,
        )

    def _last_words(self, place: str) -> str:
        """Returns the last line of the output that names an error, or the last one."""
        text = (self.folder / place / "logs/command.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        return "".join((errors or lines)[-1:])[:_MOST_REASON]


def _scenario(name: str, system: System) -> ExternalScenario:
    path = library() / EXTERNAL_FOLDER / f"referee-{name}.yaml"
    loaded = load_external(path, read_yaml(path), external_kinds(kinds()), system.command)
    return replace(loaded.scenario, launcher=LAUNCHERS[system.launcher])


def _told(system: System) -> str:
    """Returns the command as a person would type it."""
    words = [word.replace(f"{_JOBS}/", "").replace(sys.executable, "python") for word in system.command]
    return " ".join(words)

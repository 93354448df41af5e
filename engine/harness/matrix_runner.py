"""Runs the cells of a matrix in lanes, keeps the results, and shrinks a failing cell."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.codec.values import value_of
from engine.core.checks.cell_result import CellResult, key_of
from engine.core.job.job import Job
from engine.core.texts import trust_words

if TYPE_CHECKING:
    from engine.core.faults.matrix import SmallestScenario
    from engine.core.faults.scenario import Scenario
    from engine.core.message_kinds import Plain
    from engine.files.jobs.matrix_file import PlannedCell
    from engine.runtime.process.fork_client import Lanes

# number of the result, number of cells, result, expected seconds for the rest
TellResult = Callable[[int, int, CellResult, float], None]
_MOST_OF_FILE_NAME = 200  # bytes; a file system allows 255, including prefix and suffix
LANE = "engine.harness.matrix_lane"


@dataclass(slots=True)
class MatrixRun:
    """One run of some cells; all its files go to `folder`."""

    folder: Path
    settings: tuple[str, ...]
    limit_s: float
    keep: bool = False

    def task(self, name: str, scenario: dict[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the task of a lane: name, scenario as plain values, settings, and the folder for the run."""
        return {
            "cell": name,
            "file": _file_name(name),
            "scenario": scenario,
            "settings": list(settings),
            "results": str(self.folder / "runs"),
            "keep": self.keep,
        }

    def run(
        self,
        lanes: Lanes,
        cells: Sequence[PlannedCell],
        expected_s: Mapping[str, float],
        tell: TellResult = lambda number, count, result, left_s: None,
    ) -> list[CellResult]:
        """Runs cells, appends each result to the folder and reports it by `tell`; returns the results as they ended."""
        from engine.files.matrix_results import append_result

        by_name = {planned.cell.name: planned for planned in cells}
        left_s = sum(expected_s[name] for name in by_name)
        started_s, expected_done_s = time.monotonic(), 0.0
        results: list[CellResult] = []

        def take(task: dict[str, Any], answer: Plain) -> None:
            nonlocal left_s, expected_done_s
            planned = by_name[task["cell"]]
            result = self._result(planned, answer)
            append_result(self.folder, result)
            results.append(result)
            taken_s = expected_s[task["cell"]]
            left_s, expected_done_s = left_s - taken_s, expected_done_s + taken_s
            still_s = left_s * (time.monotonic() - started_s) / max(expected_done_s, 1e-9)
            tell(len(results), len(cells), result, still_s)

        tasks = [self.task(planned.cell.name, planned.cell.values, self.settings) for planned in cells]
        self._give(lanes, tasks, take)
        return results

    def _give(
        self, lanes: Lanes, tasks: Sequence[dict[str, Any]], take: Callable[[dict[str, Any], Plain], None]
    ) -> None:
        """Runs tasks in lanes; afterwards points the link to the newest remaining run, or removes it."""
        from engine.files.run_folder import point_latest_to_newest

        try:
            lanes.run(tasks, self.limit_s, take)
        finally:
            point_latest_to_newest(self.folder / "runs")

    def _result(self, planned: PlannedCell, answer: Plain) -> CellResult:
        labels = dict(planned.cell.labels)
        key = key_of(planned.cell.values, self.settings)
        if "result" in answer:
            result = value_of(answer["result"], CellResult, "the answer of a lane")
            return replace(result, labels=labels, line=planned.line, key=key)
        loaded = planned.loaded
        do = loaded.faults[0].do if loaded.faults else ""
        text = f"the lane ended with code {answer['ended']}; its log is in {self.folder}"
        lost = CellResult(planned.cell.name, "invalid", "", text, do, 0.0, loaded.seed, "", labels, planned.line, key)
        if answer["ended"] != "hang":
            return lost
        text = f"no end within {self.limit_s:g} s"
        return replace(lost, result="failed", failure="hang", text=text, seconds=self.limit_s)

    def shrink(
        self, lanes: Lanes, scenario: Scenario, failed: CellResult, budget: int, say: Callable[[str], None]
    ) -> tuple[Path, SmallestScenario]:
        """Returns the file of the smallest scenario that fails like this cell, and the search; `say` gets each try."""
        from engine.core.faults.matrix import shrink
        from engine.core.faults.scenario import scenario_plain
        from engine.files.atomic_write import write_atomically
        from engine.files.jobs.library import scenario_text
        from engine.runtime.faults.registry import kinds

        def fails(smaller: Scenario) -> bool:
            answers: list[Plain] = []
            tasks = [self.task(f"shrink/{failed.cell}", scenario_plain(smaller))]
            self._give(lanes, tasks, lambda task, answer: answers.append(answer))
            result = answers[0].get("result", {"result": "failed", "failure": answers[0].get("ended")})
            same = (result["result"], result["failure"]) == (failed.result, failed.failure)
            job = smaller.job
            size = f"{len(smaller.faults)} faults, {job.pipelines} x {job.cut}, {job.steps} steps"
            say(f"shrink: {size}, {job.microbatches} microbatches: {'fails' if same else 'does not'}")
            return same

        shrunk = shrink(scenario, fails, kinds(), budget)
        scenario = replace(shrunk.scenario, job=replace(shrunk.scenario.job, results=Job().results))  # of this search
        shrunk = replace(shrunk, scenario=scenario)
        path = self.folder / f"shrunk-{_file_name(failed.cell)}.yaml"
        head = f"# The smallest scenario found that fails as {failed.cell} does: {failed.failure}.\n"
        head += f"# Run it: {shrunk_command(path, shrunk)}\n"
        shown = replace(scenario, job=scenario.job.masked)
        write_atomically(path, head + scenario_text(scenario_plain(shown)))
        return path, shrunk


def _file_name(cell: str) -> str:
    """Returns the name of a cell for use in a file's name; a long one ends in its hash."""
    name = cell.replace("/", "-")
    whole = name.encode("utf-8", "replace")
    if len(whole) <= _MOST_OF_FILE_NAME:
        return name
    return f"{whole[:100].decode('utf-8', 'ignore')}-{hashlib.sha256(whole).hexdigest()[:16]}"


def shrunk_command(path: Path, shrunk: SmallestScenario) -> str:
    """Returns the command that runs the scenario of a search, whose file has the whole job."""
    return shlex.join(["bamboo", "matrix", str(path), *trust_words(shrunk.scenario.job.names_code)])


def usual_jobs() -> int:
    """Returns the default number of lanes: one per core, at most 8."""
    return max(1, min(len(os.sched_getaffinity(0)), 8))

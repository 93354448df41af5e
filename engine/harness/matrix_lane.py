"""A lane of `bamboo matrix`: a process that runs cells one after another, with one fork server for all.

Started as ``python -m engine.harness.matrix_lane FD``; FD is one end of a link (`engine/runtime/process/link.py`). Its
log has the results, and the lines that `bamboo inject` would print.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.checks.cell_result import CellResult, judged
from engine.core.checks.expectations import Check
from engine.core.errors import BY_SIGNAL, BambooError

if TYPE_CHECKING:
    from engine.core.message_kinds import Plain
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.runtime.process.fork_client import ForkServer


def run_cell(task: Plain, server: ForkServer) -> CellResult:
    """Runs the cell of a task (see `MatrixRun.task`); the result is invalid if it could not be run."""
    from engine.files.atomic_write import make_folder
    from engine.files.jobs.library import scenario_text
    from engine.files.jobs.scenario_file import load_document
    from engine.files.strict_yaml import read_text
    from engine.harness.job_checks import offered
    from engine.runtime.faults.registry import kinds

    started_s = time.monotonic()
    results = Path(task["results"])
    make_folder(results, results.parent)
    path = results / f"{task['file']}.yaml"
    document = read_text(scenario_text(task["scenario"]), str(path))  # not on disk: it may have secret values
    do, seed = "", 0
    try:
        settings = [*task["settings"], f"results={results}"]
        trusted = offered.trusting(True)  # the command has checked the file that the cell is from
        loaded = load_document(path, document, kinds(), None, settings, trusted)
        do, seed = loaded.faults[0].do if loaded.faults else "", loaded.seed
        result = _checked(task["cell"], loaded, server, keep=task["keep"])
    except BambooError as error:
        result = CellResult(task["cell"], "invalid", "", f"could not be run: {error}")
    seconds = round(time.monotonic() - started_s, 3)
    return replace(result, do=do, seconds=seconds, seed=seed)


def _checked(cell: str, loaded: LoadedScenario, server: ForkServer, *, keep: bool) -> CellResult:
    from engine.harness.case import case_of_file
    from engine.harness.case_runner import run_case
    from engine.harness.screen import lines_only

    case = run_case(case_of_file(loaded), None, lines_only(partial(print, flush=True)), server)
    is_interrupted = case.exit_code in BY_SIGNAL
    wrong = contradiction(case.folder) if case.verdict == "passed" and not is_interrupted else ""
    if not keep and (is_interrupted or (case.verdict == "passed" and not wrong)):
        shutil.rmtree(case.folder, ignore_errors=True)
    if is_interrupted:
        sys.exit(int(case.exit_code))
    stalls = [recovery.stall for recovery in case.recoveries if recovery.stall]
    longest = max(stalls, key=lambda stall: stall.least_ns, default=None)
    checks = (Check("evidence", "failed", wrong),) if wrong else case.checks
    result = CellResult(cell, *judged(checks), run=case.folder.name, raised=case.exceptions())
    return replace(result, stall_ms=longest.least_ns / 1e6, stall_bound=longest.bound) if longest else result


def contradiction(run: Path) -> str:
    """Returns in words what the files of a passed run fail to prove; its verdict came from memory."""
    from engine.core.history.process_records import ComparisonRecord
    from engine.files.events_file import read_history
    from engine.files.evidence import proof_of
    from engine.files.run_folder import RunFolder

    folder = RunFolder(run)
    history = read_history(folder.events)
    proof = proof_of(folder, history)
    missing = proof.missing if history.first(ComparisonRecord) else ""  # without a twin, weights are not judged
    return str(proof.flaws[0]) if proof.flaws else missing


def main(fd: int) -> None:
    """Runs a case for each message, until the other end is closed; an interrupted case does not finish its step."""
    from engine.codec.values import plain_of, text_of
    from engine.core.messages import CaseMessage, DoneMessage
    from engine.harness.leak_check import mark_processes
    from engine.runtime.process.fork_client import ForkServer
    from engine.runtime.process.interrupts import holding
    from engine.runtime.process.link import Link

    link = Link.from_fd(fd)
    mark_processes()
    with holding() as interrupts, ForkServer() as server:
        interrupts.step_grace_s = 0.0
        while isinstance(message := link.receive(), CaseMessage):
            result = run_cell(message.task, server)
            print(text_of(result), flush=True)
            link.send(DoneMessage(plain_of(result)))


if __name__ == "__main__":
    main(int(sys.argv[1]))

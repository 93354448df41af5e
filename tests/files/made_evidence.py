"""The evidence of a made-up run that was compared with its twin, written by the writers of real ones."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from unittest.mock import patch

from engine.core.checks.proof import compare
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.history.process_records import (
    CheckRecord,
    ComparingRecord,
    EndedRecord,
    StartedRecord,
    TrainingEndedRecord,
    TwinRecord,
    VerdictRecord,
)
from engine.core.history.run_records import (
    AGENT,
    VERSION,
    AuditRecord,
    CommitRecord,
    EpochRecord,
    GoRecord,
    JobRecord,
    MarkRecord,
    PartitionRecord,
)
from engine.core.history.step_files import FOLDER, span_of
from engine.core.job.bit_fields import twin_of
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.files.evidence import seal_of
from engine.files.linked_lines import add_records
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import trajectory_text
from engine.runtime.process.recorder import Recorder, StepWriter, open_events, open_steps

LAYERS, WORKERS = 4, 3


def make_evidence(run: Path, steps: int = 12, *, is_compared: bool = True, wrong_step: int = -1) -> RunFolder:
    """Makes the folder of a run; with `wrong_step` its weights differ from those of the twin from that step on."""
    folder, job = RunFolder(run), Job(model="mlp", stages=WORKERS, microbatches=2, steps=steps)
    run.mkdir(parents=True)
    rows = _session(folder, job, wrong_step)
    folder.trajectory.write_text(trajectory_text(rows))
    folder.run_json.write_text(json.dumps({"job": {}, "result": None}))
    if is_compared:
        add_records(folder.events, ComparingRecord())
        folder.twin.path.mkdir()
        twin = _session(folder.twin, twin_of(job), -1)
        add_records(folder.twin.events, EndedRecord(outcome="finished", exit_code=0))
        folder.twin.trajectory.write_text(trajectory_text(twin))
        losses = tuple(sorted({row.step: row.loss or 0.0 for row in twin}.items()))
        add_records(folder.events, TwinRecord(losses=losses), compare(rows, twin, read_history(folder.events)))
    add_records(folder.events, CheckRecord(name="trajectory", result="passed", text="identical in all steps"))
    add_records(folder.events, VerdictRecord(result="passed", exit_code=0))
    add_records(folder.events, seal_of(run), EndedRecord(outcome="finished", exit_code=0))
    return folder


def _session(folder: RunFolder, job: Job, wrong_step: int) -> list[TrajectoryRow]:
    """Writes the records of training, by the launcher and by workers, and returns the trajectory."""
    events, steps = open_events(folder.events), open_steps(folder.path / FOLDER)
    span = span_of(job)
    agent = Recorder(events, AGENT, StepWriter(steps, None, span))
    agent.write(JobRecord(version=VERSION, job=job))
    workers = []
    for number in range(WORKERS):
        agent.write(StartedRecord(of=number, child=100 + number, slots=((0, number),)))
        with patch("os.getpid", return_value=100 + number):
            workers.append(Recorder(events, number, StepWriter(steps, number, span)))
    agent.write(PartitionRecord(starts=(0, 1, 2), layers=("a", "b", "c", "d")))
    owners = tuple(range(WORKERS))
    shadows = ((1,), (2,), (0,))
    reason = "all have joined"
    agent.write(
        EpochRecord(epoch=1, members=owners, verdict=(), reason=reason, planned=False, owners=owners, shadows=shadows)
    )
    agent.write(GoRecord(epoch=1, end=False))
    rows = []
    for step in range(job.steps):
        for recorder in workers:
            recorder.action(1, step, f"{recorder.worker}F0", 1_000 * step + 1, 1_000 * step + 500)
        if step % 3 == 0:
            workers[step % WORKERS].write(MarkRecord(phase="fence", epoch=1))
        loss = 5.0 / (step + 1)
        last = step == job.steps - 1
        agent.write(CommitRecord(step=step, loss=loss, grad_norm=1.0, clip_factor=1.0, last=last))
        seed = "other" if 0 <= wrong_step <= step else ""
        of_step = [_row(step, layer, loss, seed) for layer in range(LAYERS)]
        for worker, layers in ((0, (0, 1)), (1, (1, 2, 3))):
            told = tuple((layer, of_step[layer].state, of_step[layer].buffers) for layer in layers)
            agent.write(AuditRecord(of=worker, step=step, pipeline=0, rows=told))
        rows += of_step
    agent.write(TrainingEndedRecord(outcome="finished", exit_code=0))
    for recorder in (agent, *workers):
        recorder.close()
    os.close(events)
    os.close(steps)
    return rows


def _row(step: int, layer: int, loss: float, seed: str) -> TrajectoryRow:
    state, buffers = (hashlib.sha256(f"{part} {step} {layer} {seed}".encode()).hexdigest() for part in ("state", "b"))
    return TrajectoryRow(step, layer, state, buffers, loss)

"""The benchmarks of a GPU with a tiny job on the CPU: their code runs, whatever the figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.bench import gpu
from engine.bench.gpu import JOB, cases_of, gpu_cases
from engine.bench.plain_peer import step_seconds
from engine.bench.runs import flags
from engine.core.errors import EnvironmentLacksError
from engine.core.job.job import Job
from engine.core.units import Args
from engine.files.accelerators import Accelerators
from engine.files.jobs.job_file import resolve_job
from engine.harness.job_checks import readable

SMALL: Args = {"width": 16, "depth": 4, "heads": 2}
TINY = replace(JOB, model_args=SMALL, data_args={"sequence": 16}, device="cpu", share_gpu=False, steps=3)


def test_without_a_gpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentLacksError, match="need one, and there is no GPU"):
        gpu_cases(quick=True)
    monkeypatch.setattr(gpu, "accelerators", lambda: Accelerators(1, ("A",), "1", "13.0"))
    assert len(gpu_cases(quick=False)) == 5


@pytest.mark.parametrize("job", [JOB, TINY, replace(TINY, deterministic=False, redundancy="lazy", audit=1)])
def test_the_settings_of_a_run_make_its_job(job: Job, tmp_path: Path) -> None:
    settings = flags(job)[1::2]
    assert resolve_job(None, {}, settings, project=tmp_path, offered=readable).job == job


def test_a_plain_loop_tells_the_time_of_a_step() -> None:
    assert 0 < step_seconds(replace(TINY, stages=1)) < 100


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        *("one worker beside plain PyTorch", "lazy beside none, 2 workers", "audit 1 beside 0, 2 workers"),
        *("deterministic beside not, 2 workers", "four workers beside torch's pipeline"),
    ],
)
def test_each_case_has_its_rows(case: str, tmp_path: Path) -> None:
    rows = cases_of(TINY, 1, 1)[case](tmp_path)
    assert {row.case for row in rows} == {case} and len(rows) == 3
    assert all(row.ours > 0 and row.peer > 0 for row in rows)

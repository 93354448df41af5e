"""`bamboo run --isa`: the set is recorded with the facts of the host, and a run goes on with the same one only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(180)]
SMALL = ("--model", "mlp", "--stages", "2", "--microbatches", "2", "--steps", "4", "--set", "restarts=0")


def test_a_fixed_set_is_recorded_and_held(tmp_path: Path) -> None:
    results = ("--results", str(tmp_path / "results"))

    def run(name: str, *arguments: str) -> tuple[int, str]:
        launched = Launcher(tmp_path / name, ["run", *arguments, *results], {})
        done = launched.wait()
        return done.code, done.stderr

    assert run("fixed", *SMALL, "--isa", "portable", "--checkpoint-every", "2")[0] == 0
    facts = json.loads((tmp_path / "results" / "latest" / "run.json").read_text())["host"]
    wanted = ["ATEN_CPU_CAPABILITY=default", "MKL_CBWR=COMPATIBLE", "ONEDNN_MAX_CPU_ISA=SSE41"]
    assert facts["kernel_variables"] == wanted
    fixed = str((tmp_path / "results" / "latest").resolve())
    code, told = run("other", "--resume", f"{fixed}@1", "--steps", "4")
    assert code == 2
    assert "kernel_variables: expected ['ATEN_CPU_CAPABILITY=default', " in told
    assert "isa: expected ['portable'] as in the checkpoint" in told
    assert run("same", "--resume", f"{fixed}@1", "--isa", "portable")[0] == 0


def test_the_set_is_a_problem_beside_those_of_the_job(tmp_path: Path) -> None:
    done = Launcher(tmp_path / "wrong", ["run", "--isa", "sse9", "--stages", "x"], {}).wait()
    assert done.code == 2
    assert "--isa: expected one of portable, avx2, avx512, found 'sse9'" in done.stderr
    assert "--stages: expected a whole number, found 'x'" in done.stderr

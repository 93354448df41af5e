"""A model of a real size has other defaults for its job; a value that is given wins, and a plan of it comes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.files.jobs.job_file import resolve_job
from engine.files.jobs.resolved_job import ResolvedJob
from engine.harness.job_checks import offered


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def resolved(*settings: str) -> ResolvedJob:
    return resolve_job(None, {}, settings, offered=offered)


def test_a_model_has_defaults_for_its_job_which_say_so() -> None:
    found = resolved("model=gpt-1b")
    assert (found.job.dtype, found.job.lr, found.job.data_args) == ("bfloat16", 3e-4, {"sequence": 1024})
    assert {found.origins[each] for each in ("dtype", "lr", "data_args.sequence")} == {"default of gpt-1b"}
    assert resolved("model=gpt").job.dtype == "float32"


def test_a_value_that_is_given_wins() -> None:
    found = resolved("model=gpt-100m", "dtype=float32", "data_args.sequence=64")
    assert (found.job.dtype, found.job.lr, found.job.data_args) == ("float32", 3e-4, {"sequence": 64})
    given = [found.origins[each] for each in ("dtype", "data_args.sequence")]
    assert given == ["--set", "--set"]


def test_other_data_get_no_arguments() -> None:
    assert resolved("model=gpt-100m", "data=synthetic").job.data_args == {}


def test_the_record_of_a_run_repeats_its_job(tmp_path: Path) -> None:
    given = resolved("model=gpt-100m", "dtype=float16").job
    Path("again.yaml").write_text(json.dumps(asdict(given)))
    assert resolve_job(Path("again.yaml"), {}, offered=offered).job == given


def test_the_plan_of_a_large_model_needs_no_torch() -> None:
    code = "import sys; from bamboo_cli.__main__ import main\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules"
    options = ["run", "--model", "gpt-1b", "--stages", "8", "--microbatches", "32", "--dry-run", "--json"]
    ended = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert plan["peak_stash"]["0"] == 8 and round(plan["bubble"], 3) == round(7 / 39, 3)

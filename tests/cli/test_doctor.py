"""`bamboo doctor` as a process: its text, its JSON and its exit code; it does not import torch itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# torch cannot be imported in this process; the probe runs in another.
PROGRAM = """
import sys, typer
sys.modules["torch"] = None
from bamboo_cli.doctor import doctor
typer.run(doctor)
"""


def run_doctor(*arguments: str, python_path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command in a child process."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{python_path}{os.pathsep}{ROOT}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_machine_that_runs_the_tests_passes_with_one_line_per_check(tmp_path: Path) -> None:
    done = run_doctor("--results", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {status for status, _ in lines} <= {"ok", "warn"}
    for name in ("python", "fork server", "loopback", "links", "results", "torch", "gpu", "arithmetic"):
        assert sum(text.startswith(name) for _, text in lines) == 1


def test_a_torch_that_cannot_be_loaded_is_missing_and_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    done = run_doctor("--results", str(tmp_path), python_path=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if not line.startswith(("ok", "warn"))]
    assert done.returncode == 4
    assert line.split() == [
        *["missing", "torch", "ImportError:", "libtorch_cpu.so:", "cannot", "open", "shared", "object", "file"],
        *["->", "pip", "install", "'torch>=2.10'"],
    ]


def test_a_results_folder_that_cannot_be_written_is_missing_in_one_object() -> None:
    done = run_doctor("--json", "--results", "/proc/bamboo")
    printed = json.loads(done.stdout)
    assert list(printed) == ["checks", "exit_code"]
    assert all(list(check) == ["name", "status", "found", "fix"] for check in printed["checks"])
    assert printed["exit_code"] == done.returncode == 4
    assert [check["name"] for check in printed["checks"] if check["status"] == "missing"] == ["results"]

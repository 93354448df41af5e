"""What is promised on a GPU, with tensors that go through host memory: `make test-gpu` tries it, and writes a page.

Elsewhere each test is skipped with the reason. Nothing here has been run on a GPU yet.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import ExitCode
from engine.files.trajectory_file import trajectory_rows
from tests.gpu.gpu_session import BAMBOO, ROOT, WHY, note, run
from tests.gpu.hardware_page import Figure

JOB = ["--steps", "6", "--stages", "2", "--device", "cuda", "--backend", "direct", "--share-gpu"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("in_time"),
]


@pytest.mark.parametrize("fields", [["--model", "mlp"], [], ["--model", "resnet18"]], ids=["mlp", "gpt", "resnet18"])
def test_a_job_has_the_same_bits_each_time_and_after_a_kill(
    figures: list[Figure], tmp_path: Path, fields: list[str]
) -> None:
    since_s, name = time.monotonic(), (fields or ["", "gpt"])[-1]
    first = run(tmp_path, *JOB, *fields)
    again = run(tmp_path, *JOB, *fields)
    assert first["trajectory"] == again["trajectory"]
    memory = ", ".join(f"{mib:.0f}" for mib in first["peak_memory_mib"].values())
    found = f"trajectory {first['trajectory'][:12]} both times; host memory of the workers {memory} MiB"
    note(figures, f"{name}, twice", found, since_s)
    since_s = time.monotonic()
    killed = run(tmp_path, *JOB, *fields, "--kill", "3:1")
    assert killed["trajectory"] == first["trajectory"]
    note(figures, f"{name}, one kill", "the same trajectory", since_s)


@pytest.mark.parametrize("retain", ["device", "cpu"])
def test_the_memory_of_each_worker_is_what_was_predicted(figures: list[Figure], tmp_path: Path, retain: str) -> None:
    """Within 5 %; on the double of a GPU it holds without the workspaces of cuBLAS, of which nothing is known there."""
    since_s = time.monotonic()
    size = ["--set", "model_args.width=768", "--set", "model_args.depth=8", "--set", "model_args.heads=12"]
    result = run(tmp_path, *JOB, *size, "--microbatch-size", "16", "--retain", retain)
    command = [*BAMBOO, "report", result["run_dir"], "--table", "workers", "--format", "json"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    ratios = {each["worker"]: each["device_mib"] / each["device_predicted_mib"] for each in json.loads(told.stdout)}
    peaks = ", ".join(f"{each['device_mib']:.0f}" for each in json.loads(told.stdout))
    texts = ", ".join(f"{ratio:.3f}" for ratio in ratios.values())
    note(figures, f"memory, --retain {retain}", f"peaks of {peaks} MiB, {texts} of the prediction", since_s)
    assert all(0.95 <= ratio <= 1.05 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("name", ["gpu-call-fails", "gpu-is-lost", "gpu-out-of-memory", "gpu-kernel-hangs"])
def test_a_real_fault_of_a_gpu_is_one_verdict(figures: list[Figure], tmp_path: Path, name: str) -> None:
    """The scenario is that of the double; a job on the GPU has the real fault."""
    since_s = time.monotonic()
    case = run(tmp_path, name, "--set", "device=cuda", "--set", "share_gpu=true", command="inject")
    (recovery,) = case["runs"][0]["recoveries"]
    note(figures, name, f"{recovery['verdict'][0]}; detected in {recovery['phases_ms']['detect']:.0f} ms", since_s)


NCCL = ["--steps", "6", "--stages", "2", "--device", "cuda", "--backend", "nccl", "--share-gpu"]


def test_messages_between_gpus_have_the_bits_of_messages_over_the_host(figures: list[Figure], tmp_path: Path) -> None:
    since_s = time.monotonic()
    over_host = run(tmp_path, *JOB)
    assert run(tmp_path, *NCCL)["trajectory"] == over_host["trajectory"]
    note(figures, "gpt over NCCL, two ranks on the GPUs here", "the trajectory over links", since_s)


@pytest.mark.parametrize("kill", ["3:0:F:1", "3:1:B:2", "2:1:SEND_B:0"])
def test_a_kill_over_nccl_leaves_the_bits(figures: list[Figure], tmp_path: Path, kill: str) -> None:
    since_s = time.monotonic()
    result = run(tmp_path, *NCCL, "--kill", kill)
    assert result["trajectory"] == run(tmp_path, *JOB)["trajectory"]
    note(figures, f"gpt over NCCL, kill {kill}", f"the trajectory over links; {result['recoveries']}", since_s)


def test_four_ranks_over_nccl(figures: list[Figure], tmp_path: Path) -> None:
    since_s = time.monotonic()
    four = run(tmp_path, *NCCL, "--stages", "4")
    assert four["trajectory"] == run(tmp_path, *JOB, "--stages", "4")["trajectory"]
    note(figures, "gpt over NCCL, four ranks on the GPUs here", "the trajectory over links", since_s)


BLOCKS = ["--stages", "2", "--blocks", "2", "--set", "model_args.depth=6"]


@pytest.mark.parametrize(
    "words",
    [
        [*BLOCKS, "--elastic", "--kill", "2:2", "--standby", "1"],
        ["--steps", "6", "--standby", "1", "--kill", "2:1"],
    ],
    ids=["blocks that move", "a waiting worker"],
)
def test_members_change_over_nccl(figures: list[Figure], tmp_path: Path, words: list[str]) -> None:
    since_s = time.monotonic()
    changed = run(tmp_path, *NCCL, *words)
    layers = BLOCKS if "--blocks" in words else []
    assert changed["trajectory"] == run(tmp_path, *JOB, *layers)["trajectory"]
    note(figures, f"gpt over NCCL, {' '.join(words)}", f"the trajectory over links; {changed['recoveries']}", since_s)


def asked(*place: str) -> subprocess.CompletedProcess[str]:
    command = [*BAMBOO, "agent", "--join", "latest", "--json", *place]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_a_worker_joins_over_nccl_while_the_others_train(figures: list[Figure], tmp_path: Path) -> None:
    """Its communicator joins beside one whose receives wait."""
    since_s, place = time.monotonic(), ["--results", str(tmp_path)]
    words = ["run", "--json", *NCCL, *BLOCKS, "--elastic", "--steps", "120", *place]
    with subprocess.Popen([*BAMBOO, *words], cwd=ROOT, stdout=subprocess.PIPE) as job:
        until_s = time.monotonic() + 120
        while (joiner := asked(*place)).returncode == ExitCode.NOTHING_MATCHED:
            assert time.monotonic() < until_s, joiner.stderr
            time.sleep(1)
        out, _ = job.communicate(timeout=240)
    found = [json.loads(line) for line in joiner.stdout.splitlines()]
    assert job.returncode == 0 and "member" in [each["event"] for each in found], joiner.stderr
    result = json.loads(out)
    assert not any(each["verdict"] for each in result["recoveries"])
    still = run(tmp_path, *JOB, *BLOCKS, "--steps", "120")
    assert result["trajectory"] == still["trajectory"]
    note(figures, "gpt over NCCL, one worker joins", "no verdict; the trajectory over links", since_s)


def test_a_checkpoint_is_resumed_with_the_same_bits(figures: list[Figure], tmp_path: Path) -> None:
    since_s = time.monotonic()
    whole = run(tmp_path, *JOB, "--checkpoint-every", "3")
    rest = run(tmp_path, "--resume", f"{whole['run_dir']}@2")
    assert rest["resumed_after"] == 2
    rows = [[row for row in rows_of(each) if row.step > 2] for each in (whole, rest)]
    assert rows[0] == rows[1] != []
    note(figures, "gpt, resumed after step 2", f"{len(rows[0])} equal hashes of layers", since_s)


def rows_of(result: dict[str, Any]) -> list[TrajectoryRow]:
    path = Path(result["run_dir"], "trajectory.csv")
    return trajectory_rows(path.read_text(), path)

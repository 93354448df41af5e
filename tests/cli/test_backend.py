"""`--backend nccl` on the command line: what each worker sets is printed, and what cannot run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from bamboo_cli.run import _own
from engine.core.errors import EnvironmentLacksError, Problem, UserError
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.files import accelerators
from engine.files.accelerators import Accelerators, refuse_what_this_host_lacks
from engine.files.jobs import job_file
from engine.files.jobs.job_value import OWN_LINKS
from engine.files.jobs.resolved_job import ResolvedJob
from tests.doubles.nccl_double import STAND_IN


def explained(*options: str) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(app, ["run", "--explain", "--json", *options])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_explain_prints_the_variables_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    rows = explained("--backend", "nccl", "--share-gpu")
    assert rows["NCCL_RUNTIME_CONNECT"] == {"value": "1", "origin": "each worker, before NCCL is loaded"}
    assert rows["NCCL_SOCKET_IFNAME"] == {"value": "eth0", "origin": "environment"}
    assert rows["NCCL_HOSTID"]["value"] == "bamboo-worker-<number>"
    assert rows["TORCH_NCCL_ENABLE_MONITORING"]["value"] == "0"
    assert not [name for name in explained() if "NCCL" in name]


def test_a_run_says_first_that_its_workers_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Accelerators(1, ("NVIDIA H100",), "580.65", "13.0")
    for module in (accelerators, job_file):
        monkeypatch.setattr(module, "accelerators", lambda: one)
    shared = CliRunner().invoke(app, ["run", "--dry-run", "--device", "cuda", "--share-gpu"])
    assert shared.stderr.startswith("4 workers share 1 GPU (--share-gpu): a mode for tests")
    assert "share" not in CliRunner().invoke(app, ["run", "--dry-run", "--share-gpu", "--stages", "1"]).stderr


def test_nccl_on_the_cpu_is_refused() -> None:
    (problem,) = check_job(Job(device="cpu", backend="nccl"))
    assert (problem.field, problem.expected) == ("backend", "auto or direct with device cpu")
    assert not check_job(Job(device="cuda", backend="nccl")) and not check_job(Job(device="cpu", backend="direct"))


def test_gloo_is_refused_in_one_sentence_that_names_the_links() -> None:
    refused = CliRunner().invoke(app, ["run", "--dry-run", "--backend", "gloo"]).exception
    assert isinstance(refused, UserError)
    (problem,) = refused.problems
    assert (problem.field, problem.found, problem.hint) == ("backend", "'gloo'", OWN_LINKS)
    assert OWN_LINKS.endswith("--backend direct")


def test_a_test_may_have_a_double_of_nccl_between_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read in one place; without it, nothing of it is left."""
    root = Path(__file__).parents[2]
    files = [each for part in ("engine", "bamboo_cli") for each in (root / part).rglob("*.py")]
    assert [each.name for each in files if STAND_IN in each.read_text(encoding="utf-8")] == ["accelerators.py"]
    given = ("run", "--dry-run", "--backend", "nccl", "--device", "cpu")
    assert isinstance(CliRunner().invoke(app, [*given]).exception, UserError)
    with pytest.raises(EnvironmentLacksError, match="backend nccl sends between GPUs"):
        refuse_what_this_host_lacks(Job(device="cpu", backend="nccl"), Accelerators())
    monkeypatch.setenv(STAND_IN, "a.module")
    assert CliRunner().invoke(app, [*given]).exit_code == 0
    refuse_what_this_host_lacks(Job(device="cpu", backend="nccl"), Accelerators())


def test_values_on_the_host_of_a_job_on_the_cpu_are_refused() -> None:
    (problem,) = check_job(Job(device="cpu", retain="cpu"))
    assert (problem.field, problem.expected, problem.found) == ("retain", "device with device cpu", "'cpu'")
    assert "lies on the host already" in problem.hint
    assert not check_job(Job(device="cuda", retain="cpu"))


def test_nccl_in_one_process_is_refused() -> None:
    flags = dict.fromkeys(("kill", "no_twin", "notice_command", "notice_url", "notice_every", "spot", "second"))
    flags |= {"grace": "2m", "dry_run": False, "build": False, "explained": False, "etcd": "", "etcd_plain_http": False}
    resolved = ResolvedJob(Job(backend="nccl"), {})
    found: list[Problem] = []
    _own({**flags, "in_process": False}, resolved, found)
    assert found == []
    _own({**flags, "in_process": True}, resolved, found)
    (problem,) = found
    assert (problem.field, problem.hint) == ("--in-process", "NCCL wants a process for each worker")

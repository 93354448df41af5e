"""Facts of the host: the commit is the one that git reports, and no heavy package is imported for its version."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from engine.core.checks.proof import fingerprint
from engine.core.errors import EnvironmentLacksError, UserError
from engine.core.job.bit_fields import (
    INSTRUCTION_SETS,
    BitDifference,
    bit_differences,
    bit_facts,
    compared_facts,
    different_facts,
)
from engine.core.job.job import Job
from engine.files.host_facts import fix_instruction_set, git_commit, host_facts, host_record


def git(folder: Path, *arguments: str) -> str:
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--initial-branch=work/main")
    return folder


def test_the_commit_is_what_git_says(repository: Path, tmp_path: Path) -> None:
    assert git_commit(repository) is None
    git(repository, "commit", "--allow-empty", "--message=one")
    first = git(repository, "rev-parse", "HEAD")
    (repository / "sub").mkdir()
    assert git_commit(repository / "sub") == first

    git(repository, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "--allow-empty", "--message=two")
    assert git_commit(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD") != first

    git(repository, "pack-refs", "--all")
    assert git_commit(repository) == first
    git(repository, "checkout", "--detach", "other")
    assert git_commit(repository) == git(repository, "rev-parse", "HEAD") != first


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None


def test_facts_are_there_and_torch_is_not_imported(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert facts["host"] == os.uname().nodename
    assert facts["torch"]
    assert facts["git_commit"] is None
    assert isinstance(facts["memory_bytes"], int)
    assert facts["memory_bytes"] > 2**28
    code = "import sys, pathlib; from engine.files import host_facts as h; h.host_facts(pathlib.Path()); "
    code += "assert not {'torch', 'numpy', 'subprocess'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_variable_that_chooses_other_kernels_decides_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    before = host_facts(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    now = host_facts(tmp_path)
    told = [BitDifference("kernel_variables", None, ["ATEN_CPU_CAPABILITY=default"])]
    assert bit_differences(asdict(Job()), bit_facts(before), Job(), now) == told
    assert fingerprint(Job(), before, "") != fingerprint(Job(), now, "")


def test_the_record_of_a_host_has_the_local_time_with_its_zone() -> None:
    record = host_record(datetime(2026, 11, 22, 14, 40, 15))
    assert datetime.fromisoformat(record.began).timestamp() == datetime(2026, 11, 22, 14, 40, 15).timestamp()
    assert datetime.fromisoformat(record.began).tzinfo is not None
    assert record.cores == len(os.sched_getaffinity(0))
    assert record.cpu and record.torch


@pytest.fixture(name="free_choice")
def _free_choice(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing fixes an instruction set, torch counts as not loaded, and the environment is as before afterwards."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "ISA" not in name})
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return monkeypatch


def with_processor(monkeypatch: pytest.MonkeyPatch, model: str, flags: str) -> None:
    monkeypatch.setattr("engine.files.host_facts._cpu_info", lambda path: {"model name": model, "flags": flags})


def test_a_fixed_instruction_set_makes_different_processors_equal(
    tmp_path: Path, free_choice: pytest.MonkeyPatch
) -> None:
    new, old = ("new", "avx2 fma avx512f"), ("old", "avx2 fma")
    facts = {}
    for isa in ("", "avx2"):
        if isa:
            fix_instruction_set(isa)
        for model, flags in (new, old):
            with_processor(free_choice, model, flags)
            facts[isa, model] = compared_facts(host_facts(tmp_path), Job())
    assert [each.name for each in different_facts(facts["", "new"], facts["", "old"])] == ["cpu", "isa"]
    assert different_facts(facts["avx2", "new"], facts["avx2", "old"]) == []
    told = different_facts(facts["avx2", "new"], facts["", "old"])
    assert [each.name for each in told] == ["cpu", "isa", "kernel_variables"]


def test_a_set_that_is_unknown_or_lacking_or_contradicted_is_refused(free_choice: pytest.MonkeyPatch) -> None:
    with_processor(free_choice, "old", "avx2 fma")
    with pytest.raises(UserError, match="--isa: expected one of portable, avx2, avx512, found 'sse9'"):
        fix_instruction_set("sse9")
    with pytest.raises(EnvironmentLacksError, match="avx512: expected a processor with avx512f, found 'old' on host"):
        fix_instruction_set("avx512")
    assert "MKL_CBWR" not in os.environ
    os.environ["MKL_CBWR"] = "AUTO"
    with pytest.raises(UserError, match="MKL_CBWR: expected 'AVX2', found 'AUTO'"):
        fix_instruction_set("avx2")


@pytest.mark.parametrize(("isa", "capability"), [("portable", "DEFAULT"), ("avx2", "AVX2")])
def test_torch_takes_the_fixed_set(isa: str, capability: str) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor has no AVX2")
    code = "import sys; from engine.files.host_facts import fix_instruction_set; fix_instruction_set(sys.argv[1]); "
    code += "import torch; print(torch.backends.cpu.get_cpu_capability())"
    plain = {name: value for name, value in os.environ.items() if name not in INSTRUCTION_SETS["avx2"].variables}
    command = [sys.executable, "-c", code, isa]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=plain)
    assert done.stdout.strip() == capability

"""Facts of the host: the commit is the one that git reports, and no heavy package is imported for its version."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest

from engine.core.checks.twin import fingerprint
from engine.core.config.bit_fields import BitDifference, bit_differences, bit_facts
from engine.core.config.job import Job
from engine.files.host_facts import git_commit, host_facts, host_record


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

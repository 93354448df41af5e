"""The user's code that decides bits: found by its path, without running it."""

from __future__ import annotations

import ast
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.files.jobs.user_files import code_files, data_files, file_hash

RAISES = "raise SystemExit('imported')\n"


def names(job: Job) -> list[str]:
    return [name for name, _, _ in code_files(job)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    for name in ("pack/inner/deep.py", "pack/__init__.py", "pack/inner/__init__.py", "plain/blocks.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(RAISES)
    (folder / "parts.py").write_text("import pack.inner\nthis is no Python\n")
    (folder / "net.py").write_text(f"import torch, parts\nfrom plain import blocks\nfrom . import no\n{RAISES}")
    monkeypatch.chdir(folder)
    return folder


def test_a_package_counts_whole_and_a_module_with_those_that_it_imports_from_here(here: Path) -> None:
    package = ["pack/__init__.py", "pack/inner/__init__.py", "pack/inner/deep.py"]
    assert names(Job(model="pack.inner.deep:make")) == package
    assert names(Job(data="pack:make")) == package
    assert names(Job(model="net:make")) == ["net.py", "parts.py", "plain/blocks.py"]
    (here / "pack" / "inner" / "deep.py").write_text("from plain.blocks import a")
    assert names(Job(model="pack.inner.deep:make")) == [*package, "plain/blocks.py"]
    (here / "pack" / "inner" / "deep.py").write_text(RAISES)
    (here / "parts.py").write_text("import pack.inner, net")
    assert names(Job(model="net:make", data="parts:data")) == ["net.py", *package, "parts.py", "plain/blocks.py"]
    assert names(Job(optimizer="net:Own", lr_schedule="pack:rate", metrics="missing:f1")) == names(
        Job(model="net:make", collate="pack:collate")
    )
    assert names(Job()) == names(Job(model="missing:make")) == names(Job(schedule="net:make")) == []


def test_the_user_s_other_folders_count_and_a_file_that_cannot_be_read_does_not(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = here.parent / "other"
    other.mkdir()
    (other / "elsewhere.py").write_text("import beside, parts")
    (other / "beside.py").write_text(RAISES)
    monkeypatch.syspath_prepend(other)
    assert names(Job(model="elsewhere:make")) == ["elsewhere.py", "parts.py"]
    (here / "plain" / "gone.py").symlink_to("nowhere")
    assert "plain/gone.py" not in names(Job(model="net:make"))


@pytest.mark.parametrize(
    "text",
    [
        "from plain . blocks import a",
        "from \\\n plain import blocks",
        "if True: import os, plain.blocks as b",
        "one = 1; import plain",
        "import os \\\n , plain",
        "from plain.blocks import (\n    a,\n)",
        "def f(e):\n    raise KeyError from e\n    import plain",
        "import \uff50lain",  # which Python reads as an ordinary p
        "# coding: latin-1\n# \u00e9\nimport plain",
    ],
)
def test_an_import_of_any_form_is_found(here: Path, text: str) -> None:
    (here / "net.py").write_text(text, encoding="latin-1" if "latin-1" in text else "utf-8")
    assert names(Job(model="net:make")) == ["net.py", "plain/blocks.py"]


def test_only_files_that_may_import_another_module_from_here_are_parsed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a run of code in a package of 400 files began 3 s later."""
    parsed: list[bytes] = []
    parse = ast.parse

    def counted(text: bytes) -> ast.Module:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(ast, "parse", counted)
    for number in range(50):
        (here / "pack" / f"file{number}.py").write_text(f"import os, plain.blocks\nnumber = {number}\n")
    (here / "plain" / "blocks.py").write_text('"import parts"\nfrom os import path\n')
    assert len(names(Job(model="pack:make"))) == 54
    assert len(parsed) == 2, "the first one, and one with a word in a text"


def test_a_file_is_read_once_as_long_as_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        digests.append(name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    first = file_hash(path)
    assert file_hash(path) == first
    assert len(digests) == 2  # it has changed a moment ago
    real = os.stat(path).st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: real + 3_000_000_000)
    assert file_hash(path) == file_hash(path) == file_hash(path) == first
    assert len(digests) == 3
    path.write_bytes(b"three")
    assert file_hash(path) != first


def test_of_a_folder_of_data_hidden_folders_and_what_runs_keep_do_not_count(here: Path) -> None:
    for name in ("a.txt", "inner/b.txt", ".git/c", "inner/__pycache__/d", "results/e", "kept/f"):
        (here / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "texts" / name).write_text(name)
    job = Job(data="mine:make", data_args={"root": "texts"}, results="texts/results", checkpoints="texts/kept")
    assert [name for name, _, _ in data_files(job)] == ["texts/a.txt", "texts/inner/b.txt"]

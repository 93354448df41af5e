"""The names under which workers import the parts of a job; a part that no worker could import is refused."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import engine
from engine import dry_run, train
from engine.api.run import WITHIN, TrainingRun, error_of
from engine.api.training import _keywords, folders_of, import_path
from engine.core.errors import (
    BambooError,
    ExitCode,
    NothingMatchedError,
    Problem,
    StorageError,
    UserCodeError,
    UserError,
)


def make() -> None:
    """A function of a module."""


HELD = SimpleNamespace(rows=3)


def why(thing: object) -> str:
    with pytest.raises(UserError) as caught:
        import_path("model", thing)
    (problem,) = caught.value.problems
    assert (problem.field, problem.source) == ("model", "train()")
    return problem.hint


def test_functions_classes_and_objects_of_modules_have_names() -> None:
    assert import_path("model", make) == f"{__name__}:make"
    assert import_path("data", TrainingRun) == "engine.api.run:TrainingRun"
    assert import_path("data", HELD) == f"{__name__}:HELD"
    assert import_path("data", "rows:Sums") == "rows:Sums"


def test_parts_that_no_worker_could_import_are_refused_with_the_way_out() -> None:
    def inside() -> None:
        pass

    class Own:
        pass

    assert "a lambda has no name" in why(lambda: 0) and "%%writefile mine.py" in why(lambda: 0)
    assert "inside of another function" in why(inside)
    assert "it belongs to a class" in why(SimpleNamespace.__init__)
    assert "this Own has none: pass its class or a function that makes it, or assign it at the top" in why(Own())
    assert "by name, and this partial has none" in why(functools.partial(make))
    assert "it is a module; pass one of its functions" in why(sys.modules[__name__])
    renamed = functools.wraps(make)(lambda: None)
    assert "is another object" in why(renamed)


@pytest.mark.parametrize(
    ("file", "spec", "expected"),
    [
        ("/x/mine.py", None, "mine:own"),
        ("/x/mine.py", SimpleNamespace(name="package.mine"), "package.mine:own"),
        ("/x/my-script.py", None, "is not a module name"),
        (None, None, "it has no file that a worker could import"),
    ],
)
def test_a_function_of_the_program_is_found_under_the_name_of_its_file(
    monkeypatch: pytest.MonkeyPatch, file: str | None, spec: Any, expected: str
) -> None:
    def own() -> None:
        pass

    main = ModuleType("__main__")
    own.__module__, own.__qualname__ = "__main__", "own"
    vars(main).update({"own": own, "__spec__": spec}, **({} if file is None else {"__file__": file}))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert expected in (import_path("model", own) if ":" in expected else why(own))


def test_only_folders_that_a_new_process_does_not_search_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["lonely_module:make", "lonely_module:Sums", "json:dumps", "gpt", "nowhere_at_all:x", "file.txt"]
    assert list(folders_of(names)) == [str(tmp_path)]


def test_an_import_in_a_worker_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHIN, "1")
    for call in (train, dry_run):
        with pytest.raises(UserError, match='put the call below: if __name__ == "__main__":'):
            call(steps=2)


def test_the_traceback_of_a_part_that_is_refused_ends_near_the_line_of_the_caller() -> None:
    with pytest.raises(UserError, match="has none") as caught:
        train(functools.partial(make))
    assert [each.name for each in caught.traceback][1:] == ["train", "_keywords"]


def test_values_that_no_job_has_are_refused_before_anything_starts() -> None:
    with pytest.raises(UserError) as caught:
        train(make, lr=float("nan"), model_args={"width": make})
    assert [each.field for each in caught.value.problems] == ["lr", "model_args"]


def test_a_run_raises_the_error_that_its_exit_code_stands_for() -> None:
    problems = [{"field": "stages", "expected": "more", "found": "0", "hint": "", "source": "", "line": 0, "column": 0}]
    word = {"outcome": "refused", "error": "text", "run_dir": None}
    found = error_of({**word, "exit_code": 2, "problems": problems})
    assert isinstance(found, UserError) and found.problems == (Problem("stages", "more", "0"),)
    kinds = {2: UserCodeError, 5: NothingMatchedError, 74: StorageError, 130: BambooError, 1: BambooError}
    for code, kind in kinds.items():
        found = error_of({**word, "exit_code": code, "problems": []})
        assert type(found) is kind and found.exit_code == ExitCode(code) and str(found) == "text"


def test_the_package_is_light_and_says_its_names() -> None:
    assert engine.train is train
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        engine.trian  # type: ignore[attr-defined] # noqa: B018


def test_weights_that_are_named_come_before_those_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module begins with its own weights only where the call names no others."""
    from torch import nn

    module = nn.Linear(2, 2)
    monkeypatch.setattr(sys.modules[__name__], "MODULE", module, raising=False)
    values = {"results": str(tmp_path), "init": "given.safetensors"}
    assert _keywords(module, None, None, values, has_weights=True)["init"] == "given.safetensors"
    assert [*tmp_path.iterdir()] == []
    (own,) = {_keywords(module, None, None, values | {"init": ""}, has_weights=True)["init"] for _ in range(2)}
    assert [str(each) for each in tmp_path.iterdir()] == [own]
    assert "init" not in _keywords(module, None, None, {"results": str(tmp_path)}, has_weights=False)

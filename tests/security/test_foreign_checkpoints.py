"""A checkpoint is a file from elsewhere: its job names code and folders with the user's word, or as a run here did."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.files.jobs import job_layers
from engine.files.jobs.checkpoint_choice import resume_command
from tests.files.test_checkpoint_choice import keep
from tests.security.test_foreign_files import CODE, call, folder, marks, opened

__all__ = ["folder", "opened"]  # fixtures, which each test here uses
RUN = "20261124-100000-a-0000"
CALLED = Job(**CODE, logger="stranger.inner:rows")  # type: ignore[arg-type]
FIELDS = {*CODE, "logger"}
RESUME = "run --resume elsewhere/RUN/checkpoints --other-bits".replace("RUN", RUN)


@pytest.fixture(autouse=True)
def no_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_code_of_a_checkpoint_waits_for_the_user() -> None:
    """Before, a logger, a model or a schedule that a manifest named was imported, and the run ended with 0."""
    keep(Path("elsewhere"), RUN, (3,), CALLED)
    code, problems, _ = call(RESUME)
    assert (code, {each.field for each in problems}) == (2, FIELDS)
    for each in problems:
        assert each.expected == "no code from this file" and f"elsewhere/{RUN}/checkpoints/step-00000003" in each.source
        assert "bamboo would import stranger.inner and call" in each.hint and "--trust-code" in each.hint
    for words in (f"{RESUME} --dry-run", f"{RESUME} --explain"):
        code, problems, output = call(words)
        assert (code, problems) == (0, ()) and output.count("a run needs --trust-code: ") == len(FIELDS)
    place = RESUME.split()[2]
    assert call(f"checkpoint verify {place}")[0] == call(f"checkpoint list {place}")[0] == 0
    assert call(f"export {place} --output x.pt")[0] == 0
    assert marks() == set()
    assert call(f"{RESUME} --trust-code")[0] == 99
    assert "called-model" in marks() and "called-schedule" in marks()


@pytest.mark.parametrize("words", [f"run --resume {RUN}", "run --resume latest", f"run --resume results/{RUN}"])
def test_a_run_folder_that_was_unpacked_here_names_no_code_either(words: str) -> None:
    place = keep(Path("results"), RUN, (3,), CALLED)
    (place.parent / "events.jsonl").touch()
    code, problems, _ = call(f"{words} --other-bits")
    assert (code, {each.field for each in problems}, marks()) == (2, FIELDS, set())
    before = {"place": f"results/{RUN}/checkpoints", "run": RUN, "step": 3, "file": "", "is_named": True}
    facts = {"job": {"model": "mlp", "logger": "stranger:L"}, "host": {}, "resumed": before}
    heir = keep(Path("results"), "20261125-100000-b-0000", (), CALLED).parent / "run.json"
    heir.write_text(json.dumps(facts))
    code, problems, _ = call("run --resume 20261125 --other-bits")
    assert (code, [each.field for each in problems], marks()) == (2, ["logger"], set())


@pytest.mark.parametrize("name", ["results", "checkpoints"])
def test_a_checkpoint_does_not_choose_where_to_write(name: str, tmp_path: Path, opened: list[Job]) -> None:
    """Before, folders elsewhere were made and written."""
    named: dict[str, Any] = {name: str(tmp_path / "victim")}
    keep(Path("elsewhere"), RUN, (3,), Job(model="mlp", **named))
    code, (problem,), _ = call(RESUME)
    assert (code, problem.field) == (2, name) and "bamboo would write to that folder" in problem.hint
    assert not opened and not (tmp_path / "victim").exists()
    assert call(f"{RESUME} --{name} mine")[0] == 99
    assert call(f"{RESUME} --trust-code")[0] == 99
    assert [getattr(each, name) for each in opened] == ["mine", str(tmp_path / "victim")]


def test_a_run_goes_on_in_its_own_folder_of_results_on_another_machine(tmp_path: Path, opened: list[Job]) -> None:
    """Before, the command that a run had printed was refused after a preemption: the notes are on the old machine."""
    runs = tmp_path / "runs"
    job = Job(model="mlp", results=str(runs))
    run = keep(runs, RUN, (3,), job).parent
    run.joinpath("run.json").write_text(json.dumps({"job": {"model": "mlp", "results": str(runs)}}))
    run.joinpath("events.jsonl").touch()
    words = resume_command(run, job).removeprefix("bamboo ")
    assert "--trust-code" not in words and call(f"{words} --other-bits")[0] == 99
    assert [each.results for each in opened] == [str(runs)]
    moved = tmp_path / "elsewhere" / RUN
    moved.parent.mkdir()
    run.rename(moved)
    assert resume_command(moved, job).endswith(" --trust-code")
    assert call(f"run --resume {moved} --other-bits")[0] == 2


def test_a_folder_of_a_run_here_needs_no_word_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[Job]
) -> None:
    """A place is the same from each current folder, however it was written; code is not."""
    runs = tmp_path / "runs"
    place = keep(Path("elsewhere"), RUN, (3,), Job(model="mlp", results=str(runs))).absolute()
    assert [each.field for each in call(f"run --resume {place} --other-bits")[1]] == ["results"]
    job_layers.note(Job(results=os.path.relpath(runs)))
    monkeypatch.chdir(tmp_path)
    assert call(f"run --resume {place} --other-bits")[0] == 99
    assert [each.results for each in opened] == [str(runs)]


def test_code_that_the_user_names_beside_it_needs_no_word() -> None:
    keep(Path("elsewhere"), RUN, (3,), CALLED)
    Path("job.yaml").write_text(f"model: {CODE['model']}\ndata: {CODE['data']}\n")
    words = RESUME.replace("run ", "run job.yaml ") + f" --set schedule={CODE['schedule']}"
    assert [each.field for each in call(words)[1]] == ["logger"]
    assert call(f"{words} --logger csv")[0] == 99


def test_what_a_run_had_here_before_needs_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own run is resumed as before; in another folder the same names are other code."""
    place = keep(Path("results"), RUN, (3,), CALLED)
    assert resume_command(place.parent, CALLED).endswith(" --trust-code")
    job_layers.note(CALLED)
    assert "--trust-code" not in resume_command(place.parent, CALLED)
    assert call("run --resume latest --other-bits")[0] == 99
    keep(Path("results"), RUN, (5,), replace(CALLED, logger="csv,stranger.inner:rows"))
    assert [each.field for each in call("run --resume latest --other-bits")[1]] == ["logger"]
    place = place.absolute()
    monkeypatch.chdir(tmp_path)
    assert call(f"run --resume {place} --other-bits")[0] == 2


def test_notes_that_another_could_write_count_for_nothing(tmp_path: Path) -> None:
    job_layers.note(CALLED)
    notes = tmp_path / "state" / "bamboo" / "trusted-code"
    assert (notes.stat().st_mode & 0o777, job_layers.needs_word(Path(RUN), CALLED)) == (0o600, False)
    size = notes.stat().st_size
    job_layers.note(CALLED)
    job_layers.note(Job())
    assert notes.stat().st_size == size  # each once, and nothing of a job that names no code
    notes.chmod(0o622)
    assert job_layers.needs_word(Path(RUN), CALLED)
    notes.rename(tmp_path / "elsewhere")
    notes.symlink_to(tmp_path / "elsewhere")
    assert job_layers.needs_word(Path(RUN), CALLED)
    job_layers.note(CALLED)  # in the place of the link, and not through it
    assert not job_layers.needs_word(Path(RUN), CALLED) and (tmp_path / "elsewhere").stat().st_size == size
    notes.unlink()
    notes.mkdir()
    job_layers.note(CALLED)
    assert job_layers.needs_word(Path(RUN), CALLED)

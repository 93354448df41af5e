"""Pure data, checked: a source that is not pure is refused before training, or in the first step that it spoils."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.action import Action, Op
from engine.core.checks.trajectory import DATA, LoadedMarks, PurityBook, first_difference
from engine.core.errors import UserError
from engine.core.history.run_records import CommitRecord
from engine.core.job.job import Job
from engine.core.messages import AuditMessage, CutMessage
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.models.data import Data, SplitBatches
from engine.models.data_sources import open_data
from engine.models.layers import Batch
from engine.models.model_registry import MODELS
from engine.runtime.agent.run_state import RunState
from engine.runtime.stage.random_streams import positions, set_back
from engine.runtime.worker import microbatches
from engine.runtime.worker.microbatches import DataTrial, MicrobatchLoader, mark_of
from tests.e2e import user_batches
from tests.e2e.launcher import Done, Launcher
from tests.runtime.test_data import BUILTIN_JOBS
from tests.security.impure_data import IMPURE, PURE, OneBuffer, Pure, TargetsAlone

WIDE: Mapping[str, Any] = {"stages": 2, "pipelines": 2, "microbatches": 4, "microbatch_size": 2, "steps": 9}
JOB = Job(data="mine:rows", **WIDE)


def tried(data: Data, worker: int, job: Job = JOB) -> DataTrial:
    trial = DataTrial(job, data, worker)
    with set_back():
        trial.first()
        trial.others()
        trial.again()
    return trial


def compared(monkeypatch: pytest.MonkeyPatch, datas: Mapping[int, Data], job: Job = JOB) -> None:
    """Tries the data in two workers, as the check before training does; raises UserError."""
    book = PurityBook(job.data)
    for worker, data in datas.items():
        monkeypatch.setattr(os, "getpid", lambda worker=worker: 4000 + worker)
        trial = tried(data, worker, job)
        if trial.problem:
            raise UserError([trial.problem])
        book.add(worker, [(DATA, trial.marks)])


@pytest.fixture(name="unhurried")
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a trial load all that it would: a busy machine could end it early."""
    monkeypatch.setattr(microbatches, "_SPARE_S", 60.0)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("way", IMPURE)
def test_a_source_that_is_not_pure_is_refused_by_its_name(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, sources that were pure in two microbatches of step 0 trained, on targets of other inputs."""
    source, words = IMPURE[way]
    with pytest.raises(UserError) as caught:
        compared(monkeypatch, {0: source(0), 3: source(0)})
    (problem,) = caught.value.problems[:1]
    assert problem.field == "data"
    assert problem.found.startswith("mine:rows: ")
    assert words in problem.found
    assert "microbatch " in problem.found
    assert "keyed_generator(seed, step, pipeline, microbatch)" in problem.hint
    assert "draws in __getitem__ as indexed(..., draws=True) (docs/data.md)" in problem.hint


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("way", PURE)
def test_a_source_that_is_pure_is_not_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, {worker: PURE[way](0) for worker in range(6)})


def all_built_in() -> dict[str, Job]:
    models = {f"{name}, data auto": Job(model=name) for name in MODELS}
    return {**BUILTIN_JOBS, **models}


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("name", all_built_in())
def test_no_built_in_source_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = all_built_in()[name]
    for fields in ({}, WIDE, {"microbatches": 1, "steps": 1, "stages": 1}):
        tried_job = Job(model=job.model, data=job.data, data_args=job.data_args, **fields)
        compared(monkeypatch, {worker: open_data(tried_job) for worker in (0, 1, 4)}, tried_job)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("source", ["Batches", "Microbatches"])
def test_no_source_of_whole_batches_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(data=f"tests.e2e.user_batches:{source}", model="mlp", validation_microbatches=2, **WIDE)
    compared(monkeypatch, {worker: open_data(job) for worker in (0, 3)}, job)


def test_a_whole_batch_that_is_not_pure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(user_batches.Batches):
        def batch(self, step: int, pipeline: int, size: int) -> Any:
            torch.rand(())
            whole = super().batch(step, pipeline, size)
            return type(whole)(whole.args, {"y": torch.rand(size, 1)}, whole.kwargs)

    with pytest.raises(UserError, match="the targets of microbatch"):
        compared(monkeypatch, {worker: SplitBatches(Drawing(0), JOB) for worker in (0, 3)})


def test_the_trial_leaves_no_trace_and_ends_early_where_a_source_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Pure):
        calls = 0

        def microbatch(self, *place: int) -> Batch:
            type(self).calls += 1
            return super().microbatch(*place)

    monkeypatch.setattr(microbatches, "_SPARE_S", 0.0)
    before = positions()
    tried(Counted(0), 0)
    assert positions() == before
    assert Counted.calls == 4  # the first two, twice


# In training


def forward(microbatch: int, stage: int = 0) -> Action:
    return Action(stage, Op.F, microbatch)


def test_a_microbatch_that_is_overwritten_before_its_backward_is_refused() -> None:
    """Before, the gradient of a weight was made from the inputs of another microbatch."""
    loader = MicrobatchLoader(JOB, OneBuffer(0))
    loader.load(3, forward(0))
    loader.check_used(3, forward(0))
    loader.load(3, forward(1))
    loader.load(3, forward(2))
    with pytest.raises(UserError, match="microbatch 1 of pipeline 0 in step 3 was overwritten before its backward"):
        loader.check_used(3, forward(1))


def test_a_microbatch_that_a_recovery_loads_with_other_bits_is_refused() -> None:
    loader = MicrobatchLoader(JOB, TargetsAlone(0))
    loader.prepare(3, forward(0, 1))
    prepared = loader.load(3, forward(0, 1))
    assert loader.marks_of((0, 1)) == {0: mark_of(prepared)}
    with pytest.raises(UserError, match="mine:rows: the targets of microbatch 0 of pipeline 0 in step 3 differ"):
        loader.load(3, forward(0, 1))
    loader.forget_step()
    loader.load(3, forward(0, 1))


def test_a_step_without_an_audit_has_no_marks() -> None:
    loader = MicrobatchLoader(replace(JOB, audit=3), PURE["plain"](0))
    told = []
    for step in range(9):
        loader.load(step, forward(0))
        told.append(len(loader.marks_of((0, 0))))
        loader.forget_step()
    assert told == [0, 0, 1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64])
def test_a_mark_tells_bits_and_shapes_of_each_type(dtype: torch.dtype) -> None:
    rows = torch.arange(12).reshape(3, 4).to(dtype)
    changed = rows.clone()
    changed[2, 3] = 0
    marks = {mark_of(Batch((each,), ())) for each in (rows, rows.t(), rows.reshape(4, 3), changed)}
    assert len(marks) == 4
    if dtype is torch.float32:
        assert mark_of(Batch((rows.to_sparse(),), ())) == mark_of(Batch((rows,), ()))
    assert mark_of(Batch((rows.t().contiguous().t(),), ())) == mark_of(Batch((rows,), ()))


def run_state(**values: Any) -> RunState:
    state = RunState(Job(data="mine:rows", **{"stages": 2, "microbatches": 2, **values}))
    state.cut(CutMessage((0, 1), ("first", "last")))
    return state


FIRST = {0: "a" * 16, 1: "b" * 16}
OTHER = {**FIRST, 1: "b" * 8 + "c" * 8}


def vote_of(step: int, stage: int, loaded: LoadedMarks, epoch: int = 0) -> VoteMessage:
    marks = tuple(loaded), tuple(loaded.values())
    return VoteMessage(epoch, step, (SlotVote(0, stage, (stage,), (1.0,), 0.5 if stage else None, *marks),))


def votes(state: RunState, step: int, first: LoadedMarks, last: LoadedMarks) -> None:
    """Commits a step after the votes of both stages, which have loaded `first` and `last`."""
    state.vote(0, vote_of(step, 0, first))
    state.vote(1, vote_of(step, 1, last))
    assert state.books(CommitRecord(step=step, loss=0.5, grad_norm=1.0, clip_factor=1.0, last=False))
    for layer in range(2):
        state.audit(layer, AuditMessage(step, 0, ((layer, str((step, last)), "", (), ()),)))


def test_a_step_whose_workers_have_loaded_different_data_is_not_committed() -> None:
    """Before, the agent compared no data in training, and committed the step."""
    state = run_state()
    votes(state, 0, FIRST, FIRST)
    with pytest.raises(UserError) as caught:
        votes(state, 1, FIRST, OTHER)
    (problem,) = caught.value.problems
    where = "microbatch 1 of pipeline 0 in step 1"
    assert problem.found == f"mine:rows: the targets of {where} differ between worker 0 and worker 1"
    assert state.committed == 0


def test_the_marks_of_a_dead_worker_count_until_the_commit() -> None:
    """Before, an heir could train on other data than the worker before it."""
    state = run_state()
    state.vote(0, vote_of(0, 0, FIRST))
    with pytest.raises(UserError, match="between worker 0 and worker 5"):
        state.vote(5, vote_of(0, 0, OTHER, epoch=1))


def test_who_knows_better_trains_on_it() -> None:
    state = run_state(check_pure=False)
    votes(state, 0, FIRST, OTHER)
    assert state.committed == 0


def test_the_comparison_with_the_twin_names_the_microbatch() -> None:
    """Before, it said only that the weights differ."""
    run, twin = run_state(), run_state()
    for state, other in ((run, FIRST), (twin, OTHER)):
        votes(state, 0, FIRST, FIRST)
        votes(state, 1, other, other)
        state.close_book()
    found = first_difference(run.rows, twin.rows)
    assert str(found) == (
        "step 1, microbatch 1 of pipeline 0: different data, bbbbbbbb in this run and bbbbcccc in its twin"
    )
    assert first_difference(run.rows, run.rows) is None


def bamboo(folder: Path, source: str, *arguments: str) -> tuple[Done, Launcher]:
    model = ("--model", "mlp", "--set", "model_args.width=16", "--microbatches", "3")
    data = ("--data", f"tests.security.impure_data:{source}", "--validate-every", "0")
    launcher = Launcher(folder / source, ("run", *model, *data, *arguments), {})
    try:
        return launcher.wait(), launcher
    finally:
        launcher.kill_all()


@pytest.mark.e2e
def test_a_source_that_turns_impure_ends_the_run_before_that_step_is_committed(tmp_path: Path) -> None:
    """Before, the run ended with 0, after steps on inputs and targets that do not belong together."""
    done, launcher = bamboo(tmp_path, "LateOnce", "--stages", "2", "--steps", "9")
    assert done.code == 2
    where = "microbatch 0 of pipeline 0 in step 5"
    assert f"LateOnce: the inputs and targets of {where} differ between worker " in done.stderr
    assert [event["step"] for event in launcher.events("commit")] == [0, 1, 2, 3, 4]
    assert launcher.leftovers() == []


@pytest.mark.e2e
def test_an_heir_that_loads_other_data_ends_the_run_before_that_step_is_committed(tmp_path: Path) -> None:
    """Before, the step was committed, and only a twin could tell that the weights are wrong."""
    done, launcher = bamboo(tmp_path, "OfHeir", "--stages", "3", "--steps", "12", "--kill", "4:2", "--json")
    told = json.loads(done.stdout)
    assert (done.code, told["exit_code"]) == (2, 2)
    assert "OfHeir: the inputs and targets of microbatch 0 of pipeline 0 in step 4 differ between" in done.stdout
    assert [event["step"] for event in launcher.events("commit")] == [0, 1, 2, 3]


@pytest.mark.e2e
def test_draws_of_a_constructor_and_hashes_of_texts_are_the_same_in_a_twin(tmp_path: Path) -> None:
    """Before, a text had another hash in each run, so the twin had other data; a draw in a constructor was refused."""
    done, _ = bamboo(tmp_path, "OfTexts", "--stages", "2", "--steps", "4", "--kill", "2:1")
    assert done.code == 0, done.stderr
    assert "weights identical" in done.stdout + done.stderr

"""The memory model against the tensors that workers hold at the end of a step, counted one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.core.history.run_records import FinishedRecord, KeptRecord, TensorsRecord
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes, WorkerBytes, worker_bytes
from engine.core.job.partition import fresh_ownership, shadowed
from engine.files.events_file import read_history
from engine.report.tables import tensors_table
from engine.runtime.agent.session import run_session
from engine.runtime.device.copies import tensors_of
from engine.runtime.process.thread_server import ThreadServer
from engine.runtime.worker.executor import Executor
from tests.kills import parse_kills
from tests.runtime.small_jobs import NORMED
from tests.runtime.thread_runs import with_store_double

SMALL = Job(microbatches=4, microbatch_size=2, steps=3, validate_every=0, warmup_steps=0, checkpoint_every="0")
GPT = replace(SMALL, stages=3, model_args={"width": 32, "depth": 2})
RESNET = replace(SMALL, stages=2, model="resnet18", model_args={"width": 8})
TWICE: dict[str, Any] = {**NORMED, "stages": 2, "pipelines": 2, "redundancy": "lazy"}
JOBS = {
    "gpt": replace(GPT, redundancy="lazy"),
    "gpt alone, kept": replace(GPT, redundancy="none", checkpoint_every="1"),
    "resnet18, kept": replace(RESNET, redundancy="lazy", checkpoint_every="1"),
    "resnet18 alone": replace(RESNET, redundancy="none"),
    "two pipelines, at the end": replace(SMALL, **TWICE, checkpoint_every="end"),
    "shards with shadows, kept": replace(
        SMALL, model="mlp", stages=2, pipelines=2, fsdp=1, redundancy="lazy", checkpoint_every="1"
    ),
    "shards alone": replace(SMALL, model="mlp", stages=2, pipelines=2, fsdp=1, redundancy="none"),
}


def counted(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of distinct tensors."""
    return sum({each.data_ptr(): each.nbytes for each in tensors if each.numel()}.values())


def held_by(executor: Executor) -> WorkerBytes:
    """Returns the bytes of the tensors of a worker, but for copies; those of the first pipelines' buffers too."""
    stages, logged = executor.context.replicas.stages, executor.end.logged
    layers = [layer for stage in stages.values() for layer in stage.layers.values()]
    states = [
        each
        for stage in stages.values()
        for optimizer in stage.optimizers.values()
        for named in optimizer.state.values()
        for each in named.values()
    ]
    kept = [each for stage in stages.values() for one in stage.optimizers.values() for each in one.kept.values()]
    whole = [each for layer in layers for each in layer.parameters() if each.untyped_storage().nbytes()]
    sent = [each for entry in logged.values() for named in entry.gradients.values() for each in named.values()]
    grads = [each.grad for stage in stages.values() for each in stage.trained() if each.grad is not None]
    boundary = [each for stage in stages.values() for buffers in stage.boundary for each in buffers]
    values = [each for kept in executor.value_store._tensors.values() for each in tensors_of(kept)]
    return WorkerBytes(
        weights=counted([*kept, *whole]),
        optimizer=counted(states),
        gradients=counted([*grads, *sent]),
        buffers=counted([*boundary, *(each for layer in layers for each in layer.buffers())]),
        borders=counted(values),
        copies=0,
    )


@pytest.mark.parametrize("name", JOBS)
def test_the_model_predicts_the_tensors_of_each_worker(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, most = JOBS[name], {}
    forget = Executor.forget_step

    def counting(executor: Executor) -> None:
        most[executor.context.worker] = held_by(executor)  # of the last step
        forget(executor)

    monkeypatch.setattr(Executor, "forget_step", counting)
    with ThreadServer() as server, with_store_double():
        ending = run_session(job, tmp_path / "events.jsonl", tmp_path, server=server)
    assert (ending.outcome, ending.error) == ("finished", None)
    history = read_history(tmp_path / "events.jsonl")
    ownership = shadowed(job, fresh_ownership(job), range(job.stages * job.pipelines))
    sizes = {stage: StageBytes(*rest) for done in history.of(FinishedRecord) for stage, *rest in done.sizes}
    told = {(done.of, stage): StageBytes(*rest) for done in history.of(FinishedRecord) for stage, *rest in done.sizes}
    of_slot = {slot: told[ownership.owner(*slot), slot[1]] for slot in job.grid.slots()}  # shards differ by a row
    predicted = {
        worker: worker_bytes(
            job, ownership, worker, sizes | {slot[1]: of_slot[slot] for slot in ownership.held_by(worker)}
        )
        for worker in ownership.workers()
    }
    assert predicted.keys() == most.keys()
    for worker, found in most.items():
        gathered = sum(sizes[stage].whole for _, stage in ownership.slots_of(worker) if job.fsdp)  # until the step
        assert (found.weights + gathered, found.optimizer, found.gradients) == predicted[worker][:3]
        assert found.buffers == predicted[worker].buffers
        assert predicted[worker].borders * job.retains == found.borders
    tensors = tensors_table(history)
    tensors = tensors[tensors["predicted_mib"].notna()]
    assert {*tensors["worker"]} == {*predicted} and {*tensors["at"]} == {"boundary", "peak"}
    peaks = tensors[tensors["at"] == "peak"].groupby("worker")["step"].nunique()
    assert peaks.max() == 1, "the second step is as all later ones"
    share = tensors["total_mib"] / tensors["predicted_mib"]
    assert share.between(0.95, 1.05).all(), tensors[~share.between(0.95, 1.05)].to_string()
    kept = [each.bytes for each in history.of(KeptRecord)]
    copies = sum(each.copies for each in predicted.values())
    times = {"1": 2, "end": 1, "0": 0}[job.checkpoint_every]
    assert bool(kept) is bool(times)
    for size in kept:  # with the headers of files
        assert copies <= times * size <= 1.2 * copies


def test_a_step_that_begins_again_is_not_counted_and_the_next_one_is(tmp_path: Path) -> None:
    """The others wait for its replay, and a count takes time."""
    job = replace(GPT, redundancy="lazy", steps=5)
    with ThreadServer() as server, with_store_double():
        ending = run_session(
            job, tmp_path / "events.jsonl", tmp_path, server=server, faults=parse_kills(["2:1:B:1"], job)
        )
    assert (ending.outcome, ending.error) == ("finished", None)
    records = [*read_history(tmp_path / "events.jsonl").in_epochs(TensorsRecord)]
    last = max(epoch for epoch, _ in records)
    assert min(record.step for epoch, record in records if epoch == last) == 3
    assert last > min(epoch for epoch, _ in records)

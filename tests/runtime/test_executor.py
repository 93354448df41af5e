"""The executor in whole runs of threads: replicas stay in step bit for bit, and steps survive deaths; and alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from engine.core.action import Action, Op, parse_action
from engine.core.checks.trajectory import trajectory_hash
from engine.core.faults.fault import At, Fault, When, Worker
from engine.core.messages import AuditMessage, CommitMessage
from engine.core.ownership import Grid, Ownership, Slot, fresh
from engine.core.program.compute_times import ComputeTimes
from engine.core.value import Kind, Value
from engine.models.data_sources import open_data
from engine.models.model_loader import build_model
from engine.runtime.agent.run_state import RunState
from engine.runtime.device.copies import tensors_of
from engine.runtime.process.control import Fenced
from engine.runtime.process.kernel import CoreWaits
from engine.runtime.stage.gradient_log import LogEntry
from engine.runtime.stage.replicas import Replicas, ValueStore
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.step_end import StepEnd, WorkerContext
from tests.runtime.small_jobs import NORMED, STATEFUL, TIED_GPT, small_job
from tests.runtime.thread_runs import run_in_threads

JOBS: dict[str, dict[str, Any]] = {
    "normed": NORMED,
    "normed, two pipelines": NORMED | {"pipelines": 2},
    "tied gpt": TIED_GPT,
    "tied gpt, two pipelines": TIED_GPT | {"pipelines": 2, "stages": 2},
    "sgd, recomputed": NORMED | {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "activation_checkpoint": 1},
}


def in_turn(kills: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns all pairs; `make test` has each of the kills once, with the others in turn."""
    return [
        pytest.param(kill, other, marks=[] if other == others[number % len(others)] else [pytest.mark.soak])
        for number, kill in enumerate(kills)
        for other in others
    ]


Kills = Mapping[int, tuple[int, str, When]]  # worker -> (step, action, when)
NO_KILLS: Kills = {}
_UNDISTURBED: dict[str, str] = {}


def trained(values: dict[str, Any], kills: Kills = NO_KILLS, ownership: Ownership | None = None) -> str:
    """Returns the hash of the trajectory of a job; the run compares all replicas of a layer after each step.

    Layers are tried in test_pure_check.py, which takes a third of such a run.
    """
    faults = [
        Fault(f"kill-{worker}", At(step, parse_action(action), when), (Worker(worker),))
        for worker, (step, action, when) in kills.items()
    ]
    ending = run_in_threads(small_job(**{"steps": 4, "check_pure": False, **values}), faults, ownership)
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [each.worker for each in ending.view.workers if each.state == "dead"] == sorted(kills)
    return trajectory_hash(ending.view.run_state.rows)


def undisturbed(values: dict[str, Any]) -> str:
    """Returns the trajectory when no worker dies and no replica has a shadow; each job is run once."""
    alone = {name: value for name, value in values.items() if name not in ("redundancy_level", "log_every")}
    alone["redundancy"] = "none"
    key = repr(sorted(alone.items()))
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = trained(alone)
    return _UNDISTURBED[key]


@pytest.mark.parametrize(("name", "redundancy"), in_turn([*JOBS], ["lazy", "eager"]))
def test_every_replica_has_the_bits_of_a_run_without_any(name: str, redundancy: str) -> None:
    values = JOBS[name] | {"redundancy": redundancy, "redundancy_level": 2 if redundancy == "eager" else 1}
    assert trained(values) == undisturbed(values)


def check_survival(values: dict[str, Any], kills: Kills) -> None:
    assert trained(values, kills) == undisturbed(values)


def test_the_times_of_a_vote_leave_out_the_wait_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it falls to one worker now and to another one later, which would be slow for it."""
    waited_ns, told, vote = count(step=10**12), [], StepEnd.vote

    def noted(self: StepEnd, action: Action, step: int, loaded: Any, times: ComputeTimes) -> None:
        told.append(times.of((action.pipeline, action.stage)))
        vote(self, action, step, loaded, times)

    monkeypatch.setattr(CoreWaits, "total_ns", lambda waits: next(waited_ns))
    monkeypatch.setattr(StepEnd, "vote", noted)
    assert run_in_threads(small_job(**NORMED, redundancy="none", steps=1)).outcome == "finished"
    assert told
    assert all(forward_ns < 0 and backward_ns < 0 for forward_ns, backward_ns in told), "a thousand seconds of each"


MOMENTS = [
    {0: (1, "0F0", "before")},
    {0: (1, "0B2", "after")},
    {1: (1, "1F2", "before")},
    {1: (1, "1SEND_B0", "after")},
    {2: (1, "2B3", "after")},
    {2: (1, "2REDUCE_GRAD", "after")},
    {1: (1, "1LOG", "after")},
    {0: (1, "0COMMIT", "before")},
    {2: (1, "2COMMIT", "after")},
    {1: (1, "1STEP", "before")},
    {1: (1, "1STEP", "after")},
]


@pytest.mark.parametrize(("kills", "redundancy"), in_turn(MOMENTS, ["lazy", "eager"]), ids=str)
def test_a_death_changes_no_bit(redundancy: str, kills: Any) -> None:
    check_survival(NORMED | {"redundancy": redundancy}, kills)


@pytest.mark.parametrize(
    "kills",
    [
        {1: (1, "2B1", "after")},
        {0: (1, "0COMMIT", "after")},
        {1: (1, "3F2", "before"), 2: (1, "4B1", "before")},
    ],
    ids=str,
)
def test_a_death_inside_of_a_run_of_slots_changes_no_bit(kills: Any) -> None:
    """Worker 0 has slots 0 and 1, worker 1 has 2 and 3: the outputs between them are dropped after their use."""
    check_survival(NORMED | {"stages": 5, "workers": 3, "redundancy": "eager", "redundancy_level": 2}, kills)


@pytest.mark.parametrize(
    ("kills", "checkpoint"),
    in_turn([{1: (1, "1B1", "after")}, {2: (2, "2LOG", "before")}, {0: (1, "0COMMIT", "after")}], [0, 2]),
    ids=str,
)
def test_a_death_changes_no_bit_of_tied_layers(kills: Any, checkpoint: int) -> None:
    check_survival(TIED_GPT | {"activation_checkpoint": checkpoint}, kills)


@pytest.mark.parametrize(
    ("kills", "redundancy"),
    in_turn(
        [{4: (1, "1F2@1", "before")}, {2: (1, "2REDUCE_GRAD", "after")}, {3: (1, "0STEP@1", "before")}],
        ["none", "reroute", "eager"],
    ),
    ids=str,
)
def test_another_pipeline_stands_in(redundancy: str, kills: Any) -> None:
    if redundancy == "none":
        kills = {worker: (2, *moment[1:]) for worker, moment in kills.items()}
    check_survival(NORMED | {"pipelines": 2, "redundancy": redundancy}, kills)


def test_two_deaths_one_after_the_other() -> None:
    kills: Kills = {1: (0, "1B1", "after"), 2: (2, "2F1", "after")}
    check_survival(NORMED | {"redundancy": "lazy"}, kills)


@pytest.mark.parametrize(
    "kills",
    [{1: (1, "1B1", "after"), 2: (1, "2B3", "after")}, {1: (1, "1STEP", "before"), 2: (1, "2STEP", "after")}],
    ids=str,
)
def test_two_deaths_in_one_step(kills: Any) -> None:
    check_survival(NORMED | {"redundancy": "lazy", "redundancy_level": 2}, kills)


@pytest.mark.parametrize("name", ["normed, two pipelines", "tied gpt, two pipelines"])
def test_who_owns_what_changes_no_bit(name: str) -> None:
    values = JOBS[name] | {"redundancy": "none"}
    stages = values.get("stages", 3)
    for owners in ((0,) * (2 * stages), (0, 1, *(0 for _ in range(2, 2 * stages)))):
        assert trained(values, ownership=Ownership(Grid(stages, 4, 2), owners)) == undisturbed(values)


STREAMED = [
    {1: (1, "1STREAM1", "before")},
    {1: (1, "1STREAM1", "after")},
    {1: (1, "1B2", "after")},
    {2: (1, "2SEND_B2", "after")},
    {0: (1, "0STREAM2", "after")},
    {2: (1, "2REDUCE_GRAD", "after")},
]


@pytest.mark.parametrize(("kills", "redundancy"), in_turn(STREAMED, ["lazy", "eager"]), ids=str)
def test_a_death_changes_no_bit_of_what_is_streamed(redundancy: str, kills: Any) -> None:
    check_survival(STATEFUL | {"redundancy": redundancy, "log_every": 1}, kills)


class Nothing:
    """Stands for what must not be used."""


def lone_executor(**values: Any) -> Executor:
    job = small_job(**NORMED | {"stages": 1, **values})
    data = open_data(job)
    model = build_model(job, data.facts)
    nothing: Any = Nothing()
    replicas = Replicas(job, model, (0,), [(0, 0)])
    return Executor(WorkerContext(job, 0, (0,), (), replicas, data, nothing, nothing, nothing, nothing, nothing))


def test_a_fence_takes_nobody_out_of_the_optimizer_steps() -> None:
    executor = lone_executor()

    def failpoint() -> None:
        raise Fenced

    executor._meet(Action(0, Op.STEP), failpoint)
    for op in (Op.F, Op.LOG, Op.COMMIT):
        with pytest.raises(Fenced):
            executor._meet(Action(0, op), failpoint)


def test_a_replica_that_has_not_taken_the_step_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be taken for one of the next step."""
    executor = lone_executor(pipelines=2)
    replicas = executor.context.replicas
    replicas.await_heal((1, 0))
    replicas.healed((1, 0))
    executor.end.logged[0, 0] = LogEntry({}, (), ())
    monkeypatch.setattr(executor, "_run_all", lambda entries, check: None)
    executor.catch_up(CommitMessage(0, 1.0, "step"))
    assert replicas.whole() == ((0, 0),)
    assert executor.step == 1 and not executor.end.logged


def test_what_stays_at_its_worker_is_dropped_after_its_use() -> None:
    value_store = ValueStore(keeps=True)
    value_store.enter(Ownership(Grid(3, 1), (0, 0, 1)))
    inner, outer = (Value(Kind.ACTIVATION, 0, stage, 0) for stage in (0, 1))
    back, further = (Value(Kind.GRADIENT, 0, stage, 0) for stage in (1, 2))
    for value in (inner, outer, back, further):
        value_store.make(value, (torch.ones(1),))
    assert value_store.values() == (inner, outer, back, further)
    for value in (inner, outer, back, further):
        value_store.consume(value)
    assert value_store.values() == (outer, further)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_made_is_held_until_the_commit_if_anybody_could_need_it(keeps: bool) -> None:
    value_store = ValueStore(keeps)
    value_store.enter(fresh(Grid(2, 3)))
    made, got = (Value(Kind.ACTIVATION, 0, 0, microbatch) for microbatch in (1, 2))
    parameter = torch.ones(2, requires_grad=True)
    value_store.make(made, (parameter * 2, torch.arange(2)))
    value_store.receive(got, (torch.zeros(2),))
    assert value_store.values() == (made, got)
    (one, other) = tensors_of(value_store.to_send(made)) if keeps else value_store.consume(made)
    assert one.grad_fn is None
    assert (one.requires_grad, other.requires_grad) == (True, False)
    assert value_store.consume(got)[0].tolist() == [0.0, 0.0]
    assert value_store.values() == ((made,) if keeps else ())
    if keeps:
        assert value_store.consume(made)[0].tolist() == [2.0, 2.0]
        assert value_store.values() == (made,)
    value_store.clear()
    assert value_store.values() == ()


def test_of_several_hosts_a_new_replica_tells_its_hashes_before_the_next_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host that alone knows those of its owner may be lost; the run compares them with those of the owner."""
    new, heard, tell, audit = set[tuple[int, ...]](), set[tuple[int, ...]](), StepEnd.tell_new, RunState.audit

    def tells(self: StepEnd, slot: Slot, after: int) -> None:
        object.__setattr__(self.context, "has_hosts", True)
        tell(self, slot, after)
        new.update((self.worker, slot[0], after, layer) for layer in self.replicas.stages[slot].layers)

    def hears(self: RunState, worker: int, told: AuditMessage) -> None:
        if told.step == self.committed:
            heard.update((worker, told.pipeline, told.step, row[0]) for row in told.rows)
        audit(self, worker, told)

    monkeypatch.setattr(StepEnd, "tell_new", tells)
    monkeypatch.setattr(RunState, "audit", hears)
    check_survival(NORMED | {"redundancy": "reroute", "pipelines": 2}, {1: (1, "1B1", "before")})
    assert new
    assert new <= heard

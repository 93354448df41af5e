"""Deadly hosts are named: by the rule that finds heirs, at the start, and whenever others become deadly."""

from __future__ import annotations

import random

from engine.codec.documents import documents, resume
from engine.core.history.process_records import DeadlyRecord
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.messages import ReadyMessage
from engine.core.ownership import with_shadows
from engine.core.protocol.coordinator_state import CoordinatorState, begin
from engine.core.protocol.events import LeaseExpired, WorkerWord
from engine.core.protocol.inputs_outputs import Note, ProcessExit
from engine.core.protocol.run_status import RunStatus, live_status, status_of_history
from engine.core.protocol.state import Options
from engine.core.protocol.state import begin as begin_membership
from engine.core.protocol.verdicts import NO_MORE, deadly_hosts
from engine.report.load import load
from engine.runtime.agent.host_servers import KEPT
from tests.core.coordinator_cases import Outputs, answers, begun, committed, given, heard, training, written
from tests.core.made_records import made_history

ONE_LEFT = "the run cannot survive the loss of host node-0: no other host holds stages 0, 1, 2"


def told(outputs: Outputs) -> list[str]:
    """Returns the texts of all records about deadly hosts; each has a line for the user."""
    records = [each for each in written(outputs) if isinstance(each, DeadlyRecord)]
    assert all(Note(each.text) in outputs for each in records)
    return [each.text for each in records]


def test_a_host_is_deadly_if_and_only_if_it_has_every_replica_of_a_stage() -> None:
    dice, found = random.Random(3), [0, 0]  # noqa: S311 - no secret
    for _ in range(3000):
        stages, pipelines, hosts = dice.randint(1, 4), dice.randint(1, 2), dice.randint(2, 4)
        workers = range(dice.randint(1, 6))
        options = Options(stages=stages, redundant=True)
        owners = tuple(dice.choice(workers) for _ in range(stages * pipelines))
        shadows = tuple(tuple(dice.sample(workers, dice.randint(0, min(2, len(workers))))) for _ in owners)
        nodes = {each: f"h{dice.randrange(hosts)}" for each in workers}
        state = begin_membership(options, owners, shadows, 9, 0)._replace(members=(*workers,), nodes=nodes)
        holders = [{owner, *line} for owner, line in zip(owners, shadows, strict=True)]
        expected: dict[str, tuple[int, ...]] = {}
        for host in sorted({*nodes.values()}) if len({*nodes.values()}) > 1 else ():
            of_stage = [set().union(*holders[stage::stages]) for stage in range(stages)]
            lost = tuple(stage for stage in range(stages) if {nodes[each] for each in of_stage[stage]} == {host})
            expected |= {host: lost} if lost else {}
        assert deadly_hosts(state) == expected
        found[bool(expected)] += 1
    assert min(found) > 300, "both kinds of states came"


def without_shadows() -> CoordinatorState:
    return begun(redundant=False)


def test_a_start_without_redundancy_names_every_host() -> None:
    _, outputs = given(without_shadows(), *(heard(worker, ReadyMessage()) for worker in range(3)))
    text = "the run cannot survive the loss of host node-0: no other host holds stages 0, 1; "
    assert told(outputs) == [text + "the run cannot survive the loss of host node-1: no other host holds stage 2"]


def apart(worker: int) -> str:
    return f"node-{worker % 2}"


def on_two_hosts() -> tuple[CoordinatorState, Outputs]:
    """Returns four workers that are dealt to two hosts in turn, in the second step, and all that was said."""
    job = Job(model="mlp", stages=4, redundancy="lazy", validate_every=0, steps=9)
    ownership = with_shadows(fresh_ownership(job), "lazy", 1, range(4))
    options = Options(stages=4, redundant=True)
    state = begin(job, begin_membership(options, ownership.owners, ownership.shadows, 8, 0), 0)
    return given(state, *(WorkerWord(5, worker, ReadyMessage(), apart(worker)) for worker in range(4)))


def test_a_start_with_shadows_on_other_hosts_names_none_and_the_last_host_is_named_once() -> None:
    state, outputs = on_two_hosts()
    state, more = committed(state)
    assert told((*outputs, *more)) == []
    state, outputs = given(state, LeaseExpired(8, "node-1"))
    assert told(outputs) == [], "the epoch is told first"
    state, outputs = given(state, *answers(state))
    text = "the run cannot survive the loss of host node-0: no other host holds stages 0, 1, 2, 3"
    assert told(outputs) == [text], "as soon as training goes on"
    assert told(committed(state)[1]) == [], "and once"


def test_the_next_coordinator_says_nothing_again_and_every_host_hears_it() -> None:
    state = training()
    assert state.deadly
    assert resume(state.job, documents(state), 0).deadly == state.deadly
    assert isinstance(DeadlyRecord(hosts=("node-0",), text=state.deadly), KEPT)


def test_one_host_alone_is_not_named() -> None:
    state, outputs = given(without_shadows(), *(WorkerWord(5, worker, ReadyMessage(), "here") for worker in range(3)))
    assert told((*outputs, *committed(state)[1])) == []


def test_a_heal_that_mends_it_is_told() -> None:
    """The shadow of stage 1 stands on the host of its owner, because these shadows were placed without hosts."""
    state = training()
    assert state.deadly == "the run cannot survive the loss of host node-0: no other host holds stage 1"
    state, _ = committed(state)
    state, outputs = given(state, ProcessExit(7, 1, -9), *answers(given(state, ProcessExit(7, 1, -9))[0]))
    assert told(outputs) == [NO_MORE]
    assert [each.hosts for each in written(outputs) if isinstance(each, DeadlyRecord)] == [()]


def test_the_status_and_the_report_name_the_deadly_hosts_of_now() -> None:
    started = {"event": "deadly", "hosts": ["node-0"], "text": ONE_LEFT}
    history = made_history([started])
    found = status_of_history("mine", history)
    assert found.deadly == ONE_LEFT
    assert live_status(RunStatus("mine", "running"), found).deadly == ONE_LEFT
    assert f"From epoch 0 on {ONE_LEFT}." in load(history).remarks
    mended = made_history([started, {"event": "deadly", "hosts": [], "text": NO_MORE}])
    assert status_of_history("mine", mended).deadly == ""
    assert f"From epoch 0 on {NO_MORE}." in load(mended).remarks

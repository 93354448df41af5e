"""The results of a run as another host hears them: they are those of the host that coordinates."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.codec.messages import encode
from engine.codec.records import encoded
from engine.core.errors import CoordinatorUnavailableError, InvariantError, ReplicasDifferError
from engine.core.history.process_records import ResumedRecord
from engine.core.history.run_records import (
    AuditRecord,
    CommitRecord,
    EpochRecord,
    GoRecord,
    PartitionRecord,
    Record,
    ValidationRecord,
)
from engine.core.job.job import Job
from engine.core.messages import AuditMessage, CutMessage, FinishedMessage, NoticeMessage, ReadyMessage
from engine.core.protocol.worker_times import WorkerTimes
from engine.runtime.agent import host_servers
from engine.runtime.agent.host_servers import ReplayBuffer, ReplicatedResults
from engine.runtime.agent.run_state import RunState
from tests.looped import looped

JOB = Job(model="mlp", stages=2, steps=6)
LAYERS = ("a", "b")


def audit(step: int, layer: int, text: str = "") -> AuditMessage:
    return AuditMessage(step, 0, ((layer, text or f"{step}/{layer}", "", (), ()),))


def commit(step: int) -> CommitRecord:
    return CommitRecord(step=step, loss=1.0 / (step + 1), grad_norm=1.0, clip_factor=1.0, last=step == 5)


def heard_before(job: Job = JOB) -> tuple[RunState, ReplicatedResults]:
    """Returns the results of the host that coordinates, and of one that hears, before the first step."""
    own, other = RunState(job), ReplicatedResults(job)
    own.cut(CutMessage((0, 1), LAYERS, 32))
    other.hear(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))
    return own, other


@looped("seed", range(100))
def test_a_host_that_takes_over_has_the_rows_of_the_host_before(seed: int) -> None:
    """The records of the last step may be lost on the way; its hashes are said again by the workers."""
    chance = random.Random(seed)  # noqa: S311
    own, other = heard_before()
    last = chance.randrange(5)
    for step in range(last + 1):
        own.books(commit(step))
        other.hear(commit(step))
        for layer in (0, 1):
            own.audit(layer, audit(step, layer))
            if step < last or chance.random() < 0.5:
                rows = tuple(row[:3] for row in audit(step, layer).rows)
                other.hear(AuditRecord(of=layer, step=step, pipeline=0, rows=rows))
    for step in (last - 1, last):
        for layer in (0, 1):
            other.hear_again(layer, encode(audit(step, layer)))
    for each in (own, other.results):
        each.books(commit(last + 1))
    assert [row.texts() for row in other.results.rows] == [row.texts() for row in own.rows]
    assert other.results.losses == own.losses


def test_no_time_of_another_clock_is_left_in_the_results() -> None:
    own, _ = heard_before()
    for record in (GoRecord(at_ns=7_000_000, epoch=1, end=False), replace(commit(0), at_ns=8_000_000)):
        own.books(record)
    own.taken_over(50)
    assert (own.going_at_ns, own.launched_at_ns, own.times) == (50, 0, WorkerTimes())
    own.books(GoRecord(at_ns=60, epoch=2, end=False))
    assert (own.going_at_ns, own.launched_at_ns) == (50, 60)


def test_hashes_that_are_said_again_are_compared() -> None:
    _, other = heard_before()
    other.hear(commit(0))
    other.hear_again(0, encode(audit(0, 0)))
    with pytest.raises(ReplicasDifferError):
        other.hear_again(1, encode(audit(0, 0, "another")))


def test_a_decision_that_is_told_by_two_coordinators_counts_once() -> None:
    _, other = heard_before()
    for _ in range(2):
        other.hear(commit(0))
        other.hear(ValidationRecord(step=0, name="validation", samples=4, loss=1.0, metrics={}))
    assert other.results.committed == 0
    assert len(other.results.validations[0]) == 1


def test_training_that_begins_after_a_checkpoint_is_heard() -> None:
    other = ReplicatedResults(JOB)
    other.hear(ResumedRecord(step=3, place="p", file="f", run="r", lost=0))
    assert other.results.committed == 3
    other.hear(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))
    other.hear(commit(4))
    other.hear(ResumedRecord(step=3, place="p", file="f", run="r", lost=1))
    assert other.results.committed == 3


def test_workers_that_begin_again_are_heard() -> None:
    """The epochs of the first start are not those of the run, as on the host that coordinates."""
    _, other = heard_before()
    epoch = EpochRecord(epoch=1, members=(0, 1), verdict=(), reason="", planned=False, owners=(0, 1), shadows=((), ()))
    for record in (epoch, GoRecord(at_ns=7, epoch=1, end=False)):
        other.hear(record)
    other.hear(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))
    assert (other.results.epochs, other.results.going_at_ns) == ([], 0)
    other.hear(epoch)
    assert other.results.epochs == [epoch]


def test_words_that_come_once_only_are_said_again_and_hashes_of_the_last_steps() -> None:
    said = ReplayBuffer()
    words = [encode(each) for each in (ReadyMessage(), NoticeMessage())]
    hashes = [encode(audit(step, 0)) for step in range(100)]
    for each in (*words, encode(FinishedMessage(1, (), 0, ())), *hashes):
        said.add(each)
    assert said.packets == [*words, *hashes[-64:]]


def audit_line(step: int, layer: int) -> AuditRecord:
    return AuditRecord(of=layer, step=step, pipeline=0, rows=tuple(row[:3] for row in audit(step, layer).rows))


@looped("seed", range(100))
def test_two_hosts_take_over_one_after_the_other_and_no_row_is_lost(seed: int) -> None:
    """Each host has heard a part; the next one is completed by the others, and by the hashes that are said again."""
    chance = random.Random(seed)  # noqa: S311
    own, _ = heard_before()
    hosts = {name: ReplicatedResults(JOB) for name in "bcd"}
    lines = [encoded(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))]
    committed, turn = -1, [3, 5]
    for until in turn:
        while committed < until:
            committed += 1
            own.books(commit(committed))
            lines.append(encoded(commit(committed)))
            for layer in (0, 1):
                own.audit(layer, audit(committed, layer))
                lines.append(encoded(audit_line(committed, layer)))
        voted = lines.index(encoded(commit(committed - 1))) + 1  # it was told before the votes for the last step
        for each in hosts.values():
            for number in range(each.count, chance.randint(max(each.count, voted), len(lines))):
                each.take(number, lines[number])
        heir = hosts.pop(chance.choice([*hosts]))
        heir.complete(each.last_since(chance.randint(0, heir.count)) for each in hosts.values())
        assert heir.count == max(each.count for each in (heir, *hosts.values()))
        assert heir.results.committed >= committed - 1
        for step in (committed - 1, committed):
            for layer in (0, 1):
                heir.hear_again(layer, encode(audit(step, layer)))
        for each in hosts.values():  # they are told what the heir has heard, before any new decision
            for number, line in heir.since(each.count).items():
                each.take(number, line)
        lines = [*heir.last_since(0).values()]
        if heir.results.committed < committed:  # the last commit is in the store; hashes of it are said again then
            lines += map(encoded, (commit(committed), *(audit_line(committed, layer) for layer in (0, 1))))
    (last,) = hosts.values()
    for number, line in enumerate(lines):
        last.take(number, line)
    for results in (own, last.results):
        results.close_book()
    assert [row.texts() for row in last.results.rows] == [row.texts() for row in own.rows]
    assert last.results.losses == own.losses


def test_decisions_come_once_and_in_order() -> None:
    _, host = heard_before()
    lines = [encoded(commit(step)) for step in range(3)]
    taken: list[Record | None] = [host.take(0, lines[0]), host.take(1, lines[1]), host.take(0, lines[0])]
    assert taken == [commit(0), commit(1), None]
    with pytest.raises(InvariantError, match="decision 3 was told where 2 comes next"):
        host.take(3, lines[2])


def test_old_decisions_are_forgotten_and_a_host_that_needs_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are kept as may wait in a stream: a host that lacks more does not read, and is lost."""
    lines = [encoded(commit(step)) for step in range(4)]
    monkeypatch.setattr(host_servers, "MOST_WAITING_BYTES", len(lines[2]) + len(lines[3]))
    _, host = heard_before()
    for number, line in enumerate(lines):
        host.take(number, line)
    assert [*host.since(2).values()] == [*host.last_since(0).values()] == lines[2:]
    with pytest.raises(CoordinatorUnavailableError, match="decisions 1 to 1 are not kept"):
        host.since(1)

"""The results of a run as another host hears them: they are those of the host that coordinates."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core.config.job import Job
from engine.core.elastic.worker_times import WorkerTimes
from engine.core.errors import ReplicasDifferError
from engine.core.history.process_records import ResumedRecord
from engine.core.history.run_records import AuditRecord, CommitRecord, GoRecord, PartitionRecord, ValidationRecord
from engine.core.message_codec import encode
from engine.core.messages import AuditMessage, CutMessage, FinishedMessage, ReadyMessage
from engine.core.process_messages import NoticeMessage
from engine.runtime.agent.run_state import RunState
from engine.runtime.hosts.heard_results import HeardResults
from engine.runtime.hosts.said_again import SaidAgain

JOB = Job(model="mlp", stages=2, steps=6)
LAYERS = ("a", "b")


def audit(step: int, layer: int, text: str = "") -> AuditMessage:
    return AuditMessage(step, 0, ((layer, text or f"{step}/{layer}", "", (), ()),))


def commit(step: int) -> CommitRecord:
    return CommitRecord(step=step, loss=1.0 / (step + 1), grad_norm=1.0, clip_factor=1.0, last=step == 5)


def heard_before(job: Job = JOB) -> tuple[RunState, HeardResults]:
    """Returns the results of the host that coordinates, and of one that hears, before the first step."""
    own, other = RunState(job), HeardResults(job)
    own.cut(CutMessage((0, 1), LAYERS, 32))
    other.hear(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))
    return own, other


@pytest.mark.parametrize("seed", range(100))
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
    other = HeardResults(JOB)
    other.hear(ResumedRecord(step=3, place="p", file="f", run="r", lost=0))
    assert other.results.committed == 3
    other.hear(PartitionRecord(starts=(0, 1), layers=LAYERS, samples=32))
    other.hear(commit(4))
    other.hear(ResumedRecord(step=3, place="p", file="f", run="r", lost=1))
    assert other.results.committed == 3


def test_words_that_come_once_only_are_said_again_and_hashes_of_the_last_steps() -> None:
    said = SaidAgain()
    words = [encode(each) for each in (ReadyMessage(), NoticeMessage())]
    hashes = [encode(audit(step, 0)) for step in range(100)]
    for each in (*words, encode(FinishedMessage(1, (), 0, ())), *hashes):
        said.add(each)
    assert said.packets == [*words, *hashes[-64:]]

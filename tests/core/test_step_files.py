"""The form of the files of steps: names, ranges and entries come back as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.history.record_lines import ENTRY_BYTES, StepFile, actions_in, done_in, entry, span_of, step_file
from engine.core.history.run_records import ActionRecord
from engine.core.job.job import Job

NUMBER = st.integers(0, 2**32 - 1)
WORK = st.builds(
    lambda stage, op, microbatch, pipeline: Action(stage, op, WHOLE_STAGE if op in STAGE_OPS else microbatch, pipeline),
    st.integers(0, 4095),
    st.sampled_from(list(Op)),
    st.integers(0, 65535),
    st.integers(0, 4095),
)


@given(WORK, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**62), st.integers(0, 2**61))
def test_an_action_comes_back_from_its_entry(
    work: Action, epoch: int, step: int, start_ns: int, length_ns: int
) -> None:
    data = entry(epoch, step, str(work), start_ns, start_ns + length_ns)
    assert len(data) == ENTRY_BYTES == 32
    times = {"start_ns": start_ns, "end_ns": start_ns + length_ns}
    expected = ActionRecord(worker=3, pid=7, epoch=epoch, step=step, action=str(work), **times)
    assert list(actions_in(data, 3, 7)) == [expected]
    assert list(done_in(data)) == [(step, epoch, start_ns + length_ns, work)]


@pytest.mark.parametrize("damage", [b"", bytes(ENTRY_BYTES), b"\xff" * ENTRY_BYTES, b"{}" * 16])
def test_an_unfinished_entry_and_other_bytes_cost_themselves_only(damage: bytes) -> None:
    one, two = entry(1, 2, "0F0", 5, 6), entry(1, 3, "0F0", 7, 8)
    assert [each.step for each in actions_in(one + damage + two + two[:17], 0)] == [2, 3]


def test_names_come_back_and_other_names_are_none() -> None:
    for each in (StepFile(0, 3), StepFile(12_000, 0), StepFile(500, None)):
        assert step_file(str(each)) == each
    for name in ("actions-1-05.bin", "actions-1-5.jsonl", "hashes-5.bin", "actions-5.bin", "x", "hashes-5.jsonl\n"):
        assert step_file(name) is None


@pytest.mark.parametrize(
    ("job", "span"),
    [
        (Job(), 100),
        (Job(stages=1, microbatches=1), 2000),
        (Job(stages=64, microbatches=512), 1),
        (Job(stages=8, microbatches=16, pipelines=2), 10),
    ],
)
def test_a_range_has_about_a_megabyte(job: Job, span: int) -> None:
    assert span_of(job) == span

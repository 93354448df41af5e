"""Records come back from their lines as they were; a line that is no record of this format is named for what it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.codec.records import RECORDS, decoded, encoded
from engine.core.action import STAGE_OPS, WHOLE_STAGE, Action, Op
from engine.core.errors import InvariantError
from engine.core.history.run_records import VERSION, ActionRecord, JobRecord, Record
from engine.core.history.step_files import (
    AFTER,
    BEFORE,
    ENTRY_BYTES,
    StepFile,
    actions_in,
    as_ranges,
    done_in,
    entry,
    marked_steps,
    span_of,
    step_file,
    superfluous,
)
from engine.core.job.job import Job
from tests.core.made_records import SAMPLES, made, records_of
from tests.looped import looped


def test_every_kind_of_record_has_a_sample() -> None:
    assert sorted(map(str, map(type, SAMPLES))) == sorted(map(str, RECORDS.values()))


@looped("record", SAMPLES)
def test_a_record_comes_back_from_its_line(record: Record) -> None:
    line = encoded(record)
    assert "\n" not in line
    assert decoded(line) == record
    assert RECORDS[json.loads(line)["event"]] is type(record)


def test_a_line_begins_with_kind_and_stamps() -> None:
    assert encoded(made("cut_short", worker=-1, pid=3, at_ns=5, reason="x")) == (
        '{"event":"cut_short","worker":-1,"pid":3,"at_ns":5,"reason":"x"}'
    )


def test_the_first_record_has_the_version_and_the_fields_of_the_job() -> None:
    told = json.loads(encoded(made("job", stages=3)))
    assert (told["version"], told["stages"], told["model"]) == (VERSION, 3, "gpt")
    assert "job" not in told


def test_a_field_with_a_default_is_left_out_where_it_has_it() -> None:
    assert "adopted" not in json.loads(encoded(made("mark", adopted=None)))
    assert json.loads(encoded(made("mark", adopted=())))["adopted"] == []
    after = made("fault", action=None, when=None, after="first", phase="fence", slot=None)
    assert decoded(encoded(after)) == after


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_text_because_json_has_none(number: float) -> None:
    commit = made("commit", loss=number)
    line = encoded(commit)
    told = json.loads(line, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))
    assert float(told["loss"]) == number or math.isnan(number)
    assert repr(decoded(line)) == repr(commit)
    found = made("validation", loss=number, metrics={"perplexity": number})
    assert repr(decoded(encoded(found))) == repr(found)
    with pytest.raises(InvariantError, match="the field 'loss' of event 'commit' is not right: Expected `float`"):
        decoded(json.dumps({**told, "loss": "much"}))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvariantError, match="unknown event 'comit'"):
        decoded(encoded(made("commit")).replace("commit", "comit"))


@looped("record", [each for each in SAMPLES if json.loads(encoded(each)).keys() > {"event"}])
def test_a_missing_field_is_named(record: Record) -> None:
    told = json.loads(encoded(record))
    of_job = Job.__dataclass_fields__.keys() if told["event"] == "job" else set()
    for name in told.keys() - {"event", "version", "action", "when", "adopted", "request", "host", "stage"} - of_job:
        with pytest.raises(InvariantError, match=f"event '{told['event']}' has no field '{name}'"):
            decoded(json.dumps({key: value for key, value in told.items() if key != name}))


def test_a_run_from_before_a_field_of_its_job_can_be_read() -> None:
    """The default of a new field is what a run without it did."""
    record = next(each for each in SAMPLES if isinstance(each, JobRecord))
    told = json.loads(encoded(record))
    for name in Job.__dataclass_fields__:
        read = decoded(json.dumps({key: value for key, value in told.items() if key != name}))
        assert read == replace(record, job=replace(record.job, **{name: getattr(Job(), name)}))


@looped("record", SAMPLES)
def test_a_field_of_another_type_is_named(record: Record) -> None:
    told = json.loads(encoded(record))
    for name in told.keys() - {"event", "version"} - Job.__dataclass_fields__.keys():
        with pytest.raises(InvariantError, match=f"the field '{name}' of event '{told['event']}' is not"):
            decoded(json.dumps(told | {name: {"wrong": True}}))


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvariantError, match="event 'commit' has an unknown field 'lost'"):
        decoded(encoded(made("commit")).replace('"loss"', '"lost":1,"loss"'))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1", "an older .* version 1,"),
        (f"{VERSION + 1}", f"a newer .* version {VERSION + 1},"),
        ("null", "without a version"),
    ],
)
def test_another_version_is_named_with_what_to_do(version: str, said: str) -> None:
    line = encoded(made("job")).replace(f'"version":{VERSION}', f'"version":{version}')
    with pytest.raises(InvariantError, match=f"{said}.*use the bamboo that recorded it"):
        decoded(line)


@looped("line", ["garbage", "[1]", "3", "", "{}", '{"event":'])
def test_a_line_that_is_no_record_is_shown(line: str) -> None:
    with pytest.raises(InvariantError, match="expected one event as JSON, found"):
        decoded(line)


# The form of the files of steps: names, ranges and entries come back as they were.


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


# The ranges of steps that a run keeps: within its limit, evenly, and always those that recoveries are timed by.


SIZES = st.integers(1, 300).flatmap(lambda count: st.lists(st.integers(0, 9), min_size=count, max_size=count))
KEPT = st.frozensets(st.integers(0, 300), max_size=12)


@given(SIZES, KEPT, st.integers(0, 900))
def test_never_is_a_range_left_out_that_must_stay_and_never_more_bytes_stay_than_must(
    sizes: list[int], kept: frozenset[int], limit: int
) -> None:
    num_bytes = dict(enumerate(sizes))
    out = superfluous(num_bytes, kept, limit)
    always = {0, len(sizes) - 1, len(sizes) - 2} | kept
    assert out <= num_bytes.keys() - always
    left = num_bytes.keys() - out
    assert sum(num_bytes[each] for each in left) <= limit or left <= always


@given(SIZES, KEPT, st.integers(0, 900))
def test_nothing_is_left_out_within_the_limit_and_again_and_again_leaves_the_same(
    sizes: list[int], kept: frozenset[int], limit: int
) -> None:
    num_bytes = dict(enumerate(sizes))
    assert superfluous(num_bytes, kept, sum(sizes)) == set()
    for number in superfluous(num_bytes, kept, limit):
        del num_bytes[number]
    assert superfluous(num_bytes, kept, max(limit, sum(num_bytes.values()))) == set()


def test_no_range_is_left_out_beyond_the_limit() -> None:
    assert superfluous(dict.fromkeys(range(8), 1), (), 5) == {1, 3, 5}
    assert superfluous(dict.fromkeys(range(8), 1), (), 4) == {1, 2, 3, 5}


@settings(max_examples=40)
@given(st.integers(2, 300), st.integers(8, 50))
def test_a_run_that_grows_keeps_ranges_that_lie_evenly(count: int, most: int) -> None:
    there: dict[int, int] = {}
    for number in range(count):
        there[number] = 1
        for each in superfluous(there, (), most):
            del there[each]
        assert len(there) <= most
    assert max((later - earlier for earlier, later in pairwise(there)), default=0) <= max(1, 4 * count / (most - 4))


def test_the_steps_around_a_failure_a_fault_and_an_epoch_are_marked() -> None:
    def ran(*events: dict[str, Any]) -> set[int]:
        begin: list[dict[str, Any]] = [
            {"event": "epoch"},
            {"event": "go"},
            *({"event": "commit", "step": step} for step in range(10)),
        ]
        return marked_steps(records_of([*begin, *events]))

    around = {*range(10 - BEFORE, 10 + AFTER + 1)}
    signs: tuple[dict[str, Any], ...] = (
        {"event": "epoch"},
        {"event": "fault"},
        {"event": "raised"},
        {"event": "suspicion"},
        {"event": "notice"},
        {"event": "exit", "expected": False},
    )
    for event in signs:
        assert ran(event) == around
    assert ran({"event": "exit", "expected": True}, {"event": "validation"}) == set()


def test_a_fault_in_the_first_step_after_a_checkpoint_is_marked_there() -> None:
    begin: list[dict[str, Any]] = [{"event": "resumed", "step": 9}, {"event": "epoch"}, {"event": "go"}]
    assert marked_steps(records_of([*begin, {"event": "fault"}])) == {*range(10 - BEFORE, 10 + AFTER + 1)}


def test_ranges_that_touch_are_told_as_one() -> None:
    assert as_ranges({1, 2, 5}, 100) == ((100, 299), (500, 599))
    assert as_ranges((), 100) == ()

"""Records come back from their lines as they were; a line that is no record of this format is named for what it is."""

from __future__ import annotations

import json
import math

import pytest

from engine.core.errors import InvariantError
from engine.core.history.record_lines import RECORDS, commit_fields, decoded, encoded
from engine.core.history.run_records import VERSION, Record
from engine.core.job.job import Job
from tests.core.made_records import SAMPLES, made


def test_every_kind_of_record_has_a_sample() -> None:
    assert sorted(map(str, map(type, SAMPLES))) == sorted(map(str, RECORDS.values()))


@pytest.mark.parametrize("record", SAMPLES, ids=lambda each: type(each).__name__)
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
    assert commit_fields(line) is None  # so that it is read as any other record
    assert repr(decoded(line)) == repr(commit)
    found = made("validation", loss=number, metrics={"perplexity": number})
    assert repr(decoded(encoded(found))) == repr(found)
    with pytest.raises(InvariantError, match="the field 'loss' of event 'commit' is not float: 'much'"):
        decoded(json.dumps({**told, "loss": "much"}))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvariantError, match="unknown event 'comit'"):
        decoded(encoded(made("commit")).replace("commit", "comit"))


@pytest.mark.parametrize("record", [each for each in SAMPLES if json.loads(encoded(each)).keys() > {"event"}])
def test_a_missing_field_is_named(record: Record) -> None:
    told = json.loads(encoded(record))
    for name in told.keys() - {"event", "version", "action", "when", "adopted", "request"}:
        with pytest.raises(InvariantError, match=f"event '{told['event']}' has no field '{name}'"):
            decoded(json.dumps({key: value for key, value in told.items() if key != name}))


@pytest.mark.parametrize("record", SAMPLES, ids=lambda each: type(each).__name__)
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


@pytest.mark.parametrize("line", ["garbage", "[1]", "3", "", "{}", '{"event":'])
def test_a_line_that_is_no_record_is_shown(line: str) -> None:
    with pytest.raises(InvariantError, match="expected one event as JSON, found"):
        decoded(line)

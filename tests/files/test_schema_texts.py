"""The schema of jobs takes the same texts as the code: spans of time, sizes, and the steps that are kept."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from engine.core.checkpoint_rules import keeping_of
from engine.core.job.job import parse_size
from engine.core.units import parse_duration, parse_epochs
from engine.files.jobs.forms import job_schema
from engine.files.jobs.job_value import IN_EPOCHS

NUMBERS = (
    *(
        "0",
        "00",
        "7",
        "100",
        "123456",
        "1234567",
        "123456789012",
        "1234567890123",
        "",
        "-1",
        "+1",
        "1e3",
        "1_0",
        "\u0663",
    ),
    *("0.0", "1.", ".5", "1.5", "0.001", "0.0010", "0.0001", "1.000000001", "1.0000000000", "0.000001", "0.0000010"),
    *("0.000000001", "0.1234567", "1.500000", "1.0000", "end", "END", "None"),
)
UNITS = ("", "us", "ms", "s", "m", "h", "S", " s", "d", "B", "kB", "MB", "GB", "TB", "KB", "b")
EPOCHS = ("epoch", " epochs", "epochss")
TEXTS = [
    f"{left}{number}{unit}{right}"
    for number in NUMBERS
    for unit in UNITS + EPOCHS
    for left, right in (("", ""), (" ", "\n"))
]
READERS: dict[str, Callable[[str], object]] = {
    "checkpoint_every": keeping_of,
    "validate_every": parse_epochs,
    "events_max": parse_size,
    "data_retry_for": parse_duration,
    "hang_after": parse_duration,
}


@pytest.mark.parametrize("field", READERS)
def test_schema_and_code_take_the_same_texts(field: str) -> None:
    schema = job_schema()["properties"][field]
    told = {text for text in TEXTS if re.search(schema["pattern"], text)}
    taken = {text for text in TEXTS if READERS[field](text) is not None}
    assert told == taken
    assert len(told) > 10
    assert schema["type"] == "string" or field in IN_EPOCHS

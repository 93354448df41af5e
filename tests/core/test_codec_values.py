"""Values as JSON: one text for each value, the same in every version; and any other text is refused by its field."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from engine.codec.values import parsed, read, text_of
from engine.core.errors import InvariantError
from engine.core.exclusion import Cause
from tests.looped import looped
from tests.test_house import ROOT


class Pair(NamedTuple):
    """Travels as a list."""

    cause: Cause
    number: int = 3


@dataclass(frozen=True, slots=True)
class Inner:
    """Travels as an object."""

    real: float
    plain: Any = None


@dataclass(frozen=True, slots=True)
class Whole:
    """Has a field of each form."""

    reals: Mapping[str, float]
    inner: Inner
    pairs: tuple[Pair, ...] = ()
    by_worker: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


WHOLE = Whole({"a": 1.5}, Inner(0.5, [1]), (Pair(Cause.HANG), Pair(Cause.LEFT, 4)), MappingProxyType({7: (2.5,)}))
TEXT = '{"reals":{"a":1.5},"inner":{"real":0.5,"plain":[1]},"pairs":[["hang",3],["left",4]],"by_worker":{"7":[2.5]}}'


def test_a_value_has_one_text() -> None:
    assert text_of(WHOLE) == TEXT
    assert read(TEXT, Whole, "whole") == WHOLE


@looped(
    "value",
    [1e-05, 1e16, 5e-324, -0.0, 2**70, "\u00e9\x7f\u2028\ud800\n/", [None, True], {"b": 1, "a": "\x00"}],
)
def test_a_text_is_that_of_the_standard_library_in_each_byte(value: Any) -> None:
    """Hashes of older manifests and comparisons of records depend on it: msgspec writes 1e-05 as 0.00001."""
    assert text_of(value) == json.dumps(value, separators=(",", ":"))
    assert read(text_of(Inner(0.0, value)), Inner, "inner").plain == value


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_text_wherever_it_stands(number: float) -> None:
    value = Whole({"a": number, "NaN": 1.0}, Inner(number, "NaN"), (), {3: (1.0, number)})
    text = text_of(value)
    json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))
    assert repr(read(text, Whole, "whole")) == repr(value)
    assert text_of(read(text, Whole, "whole")) == text


def test_a_long_list_of_numbers_that_are_not_finite_is_read_in_one_go() -> None:
    """A stranger's record has a line of megabytes of them: one error each would take days."""
    many = ",".join(['"NaN"'] * 200_000)
    value = read(TEXT.replace("[2.5]", f"[{many}]"), Whole, "whole")
    assert len(value.by_worker[7]) == 200_000 and all(map(math.isnan, value.by_worker[7]))


@pytest.mark.parametrize("wrong", ['"1.5"', '"nan"', "true"])
def test_a_text_beside_a_number_that_is_not_finite_is_no_number(wrong: str) -> None:
    text = TEXT.replace("0.5", '"NaN"')
    assert math.isnan(read(text, Whole, "whole").inner.real)
    with pytest.raises(InvariantError, match=r"the field '(by_worker|7)'"):
        read(text.replace("2.5", wrong), Whole, "whole")


@looped(
    ("text", "said"),
    [
        ('{"real":1.0,"plain":1,"more":2}', "has no field 'more'"),
        ('{"real":1.0}', "lacks its field 'plain'"),
        ('{"plain":1}', "lacks its field 'real'"),
        ('{"real":"much","plain":1}', "the field 'real'"),
        ('{"real":true,"plain":1}', "the field 'real'"),
        (f'{{"real":{"9" * 5_000},"plain":1}}', "invalid inner"),
        (f'{{"real":1.0,"plain":{"[" * 100_000}', "invalid inner"),
        ("[1.0, 2]", "invalid inner"),
        ("", "invalid inner"),
    ],
)
def test_another_text_is_refused_by_its_field(text: str, said: str) -> None:
    with pytest.raises(InvariantError, match=said):
        read(text, Inner, "inner")


def test_fields_of_objects_inside_are_held_too() -> None:
    with pytest.raises(InvariantError, match="has no field 'more'"):
        read(TEXT.replace('"real"', '"more":1,"real"'), Whole, "whole")
    with pytest.raises(InvariantError, match=r"'pairs' .*: Invalid enum value 'rest'"):
        read(TEXT.replace("left", "rest"), Whole, "whole")


def test_fields_with_a_default_may_be_missing_where_that_is_said() -> None:
    assert read('{"real":1.0}', Inner, "inner", is_whole=False) == Inner(1.0)
    with pytest.raises(InvariantError, match="has no field 'more'"):
        read('{"real":1.0,"more":1}', Inner, "inner", is_whole=False)


@looped("depth", range(100, 1_100, 100))
def test_a_text_that_is_nested_deep_is_a_value_or_refused(depth: int) -> None:
    text = f'{{"real":1.0,"plain":{"[" * depth}{"]" * depth}}}'
    with suppress(InvariantError):
        assert read(text, Inner, "inner").real == 1.0


def test_halves_of_surrogate_pairs_come_back() -> None:
    assert parsed('"\\ud800"') == "\ud800"


RACE = """
import sys, threading
from dataclasses import make_dataclass
from engine.codec.values import read, text_of

sys.setswitchinterval(1e-6)
for _ in range(60):
    inner = make_dataclass("Inner", [(f"a{number}", tuple[int, ...]) for number in range(20)], slots=True)
    outer = make_dataclass("Outer", [(f"b{number}", inner) for number in range(10)], slots=True)
    part = inner(*[(1, 2)] * 20)
    texts = {inner: text_of(part), outer: text_of(outer(*[part] * 10))}
    ready = threading.Barrier(4)
    threads = [
        threading.Thread(target=lambda made: (ready.wait(), read(texts[made], made, "it")), args=(made,))
        for made in (*texts, *texts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_are_the_first_to_read_a_class_do_not_crash() -> None:
    """Msgspec alone ends with SIGSEGV: it shows a class to other threads before it has looked at all of it."""
    done = subprocess.run([sys.executable, "-c", RACE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

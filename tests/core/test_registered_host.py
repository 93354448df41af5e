"""Hosts as they register: their text, and each fact in which they do not agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.codec.values import read, text_of
from engine.core.errors import InvariantError
from engine.core.hosts.host_options import RegisteredHost, differences

FACTS = {"torch": "2.13.0", "isa": ["avx2", "fma"], "stages": 4, "data files": []}
A = RegisteredHost("a", "1f", "10.0.0.1", 7, FACTS)


def test_a_host_travels_as_text() -> None:
    assert read(text_of(A), RegisteredHost, "host") == A


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a"}', "null"])
def test_another_text_is_no_host(text: str) -> None:
    with pytest.raises(InvariantError, match="invalid host"):
        read(text, RegisteredHost, "host of a run")


def test_each_difference_names_the_field_both_values_and_both_hosts() -> None:
    b = replace(A, name="b", facts={**FACTS, "isa": ["avx2"], "stages": 3})
    c = replace(A, name="c", facts={name: FACTS[name] for name in ("torch", "isa", "stages")})
    assert differences([A, replace(A, name="b")]) == []
    assert differences([A, b, c]) == [
        "isa: ['avx2', 'fma'] on host a, ['avx2'] on host b",
        "stages: 4 on host a, 3 on host b",
        "data files: [] on host a, None on host c",
    ]

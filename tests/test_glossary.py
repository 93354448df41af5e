"""The glossary of `engine/__init__.py` defines the words of the house, and no others."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import engine
from tests import glossary_rules
from tests.house_rules import parse
from tests.test_house import MODULES

PLAIN = Path(__file__).with_name("plain_words.txt").read_text(encoding="ascii").split()
DOCSTRING = engine.__doc__ or ""
TERMS = glossary_rules.glossary(DOCSTRING)


@functools.cache
def used_words() -> Counter[str]:
    """Returns how many modules use each word."""
    ours = (module for module in MODULES if module.path != "engine/__init__.py")
    return Counter(word for module in ours for word in glossary_rules.words_of(module))


def test_every_word_of_the_house_is_defined() -> None:
    assert glossary_rules.undefined(used_words(), TERMS, PLAIN) == []


def test_no_word_is_plain_and_defined() -> None:
    assert sorted(set(TERMS) & set(PLAIN)) == []


def test_every_defined_word_is_used() -> None:
    assert glossary_rules.unused(used_words(), TERMS) == []


def test_each_word_has_one_definition_of_one_sentence() -> None:
    assert len(TERMS) > 50
    assert glossary_rules.bad_definitions(DOCSTRING) == []


def test_definition_rule_can_fail() -> None:
    assert glossary_rules.bad_definitions("slot: a place.\nslot: a hole.\n") == ["slot: defined twice"]
    assert glossary_rules.bad_definitions("slot: a place. It is owned.") == ["slot: not one sentence"]


def test_glossary_rule_can_fail() -> None:
    module = parse(
        "engine/core/a.py", 'def frobnicated(worker):\n    """Frobnicates a Worker."""\n    self.healing = 1'
    )
    words = glossary_rules.words_of(module)
    assert words == {"frobnicated", "frobnicates", "a", "worker", "self", "healing"}
    used = dict.fromkeys(words, glossary_rules.FREQUENT)
    found = glossary_rules.undefined(used, ["heal", "worker"], ["self", "frobnicate"])
    assert found == []
    (found_word,) = glossary_rules.undefined(used, ["heal"], ["self", "frobnicate"])
    assert found_word.startswith("worker: 20 modules use it")
    rare = dict.fromkeys(words, glossary_rules.FREQUENT - 1)
    assert glossary_rules.undefined(rare, [], []) == []


def test_a_defined_word_that_is_unused_shows() -> None:
    assert glossary_rules.unused({"handed", "over", "slots"}, ["slot", "hand-over", "twin"]) == [
        "twin: no module uses it"
    ]

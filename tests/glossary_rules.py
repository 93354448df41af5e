"""The rules of the glossary as pure functions: the words of the house, and the lines that define them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from tests.house_rules import Module

FREQUENT = 20  # modules
_LINE = re.compile(r"^([a-z-]+): (.+)$", re.MULTILINE)
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def glossary(docstring: str) -> dict[str, str]:
    """Returns the definition of each word that a docstring defines."""
    return dict(_LINE.findall(docstring))


def bad_definitions(docstring: str) -> list[str]:
    """A word is defined once, in one sentence."""
    lines = _LINE.findall(docstring)
    twice = [f"{word}: defined twice" for word, count in Counter(word for word, _ in lines).items() if count > 1]
    return twice + [f"{word}: not one sentence" for word, text in lines if not text.endswith(".") or ". " in text]


def words_of(module: Module) -> frozenset[str]:
    """Returns the words in the names and in the docstrings of a module."""
    texts = set[str]()
    for node in module.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                texts.add(name)
            case ast.Module() | ast.ClassDef() | ast.FunctionDef():
                texts |= {getattr(node, "name", ""), ast.get_docstring(node) or ""}
    return frozenset(part.lower() for text in texts for part in _PARTS.findall(text))


def forms(word: str) -> frozenset[str]:
    """Returns the forms of a noun or a verb, as far as they follow a rule."""
    stems = (word, word + word[-1], word.removesuffix("e"), word.removesuffix("y") + "i")
    return frozenset(
        [word, *(stem + ending for stem in stems for ending in ("s", "es", "d", "ed", "ing", "er", "ers"))]
    )


def undefined(used: Mapping[str, int], terms: Collection[str], plain: Collection[str]) -> list[str]:
    """Every word that many modules use is plain English or Python, or stands in the glossary.

    `used` has the number of modules that use a word.
    """
    known = {form for word in (*terms, *plain) for form in forms(word)}
    known |= {part for term in terms for part in term.split("-")}
    return [
        f"{word}: {count} modules use it, and the glossary in engine/__init__.py does not define it"
        for word, count in sorted(used.items())
        if count >= FREQUENT and len(word) > 2 and word not in known
    ]


def unused(used: Collection[str], terms: Iterable[str]) -> list[str]:
    """Every word of the glossary is used."""
    return [
        f"{term}: no module uses it" for term in terms if not all(forms(part) & set(used) for part in term.split("-"))
    ]

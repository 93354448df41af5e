"""The exceptions that ended workers, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.history.run_records import RaisedRecord
from engine.core.texts import numbered


def exceptions_in_words(raised: Sequence[RaisedRecord]) -> list[tuple[str, RaisedRecord]]:
    """Returns a sentence and the first record of each exception; workers that raised the same in a step share it."""
    alike: dict[str, list[RaisedRecord]] = {}
    for each in raised:
        alike.setdefault(each.exception.in_step(each.step), []).append(each)
    return [(f"{numbered('worker', [each.of for each in same])} {text}", same[0]) for text, same in alike.items()]

"""The exceptions that ended workers, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.history.run_records import RaisedRecord


def exception_lines(raised: Sequence[RaisedRecord]) -> list[str]:
    """Returns one sentence for each exception; workers that raised the same one in the same step share a sentence."""
    workers: dict[str, list[int]] = {}
    for each in raised:
        workers.setdefault(each.exception.in_step(each.step), []).append(each.of)
    return [
        f"{'worker' if len(of) == 1 else 'workers'} {', '.join(map(str, of))} {text}" for text, of in workers.items()
    ]

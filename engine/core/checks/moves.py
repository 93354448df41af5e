"""The moves of slots in a run, in sentences: slow workers, the wishes of the policy, and each hand-over as it was.

Rules: a hand-over at a step boundary has its measured facts behind it: the bytes of state that new owners had to get,
and the median of up to ten steps with the former and with the new owners, where both have three at least. Owners that
change by a loss are no moves: they stand in the table of recoveries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise, takewhile
from statistics import median

from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CrampedRecord, EpochRecord, MovedRecord, PaceRecord, PolicyRecord
from engine.core.ownership import Slot, by_slot
from engine.core.texts import size_text, spans

_MOST_STEPS, _LEAST_STEPS = 10, 3


def moves_in_words(history: RunHistory) -> Iterator[str]:
    """Yields the sentences in the order of time."""
    known = {each.epoch: each for each in history.epochs}  # with the heirs that became known later
    before: EpochRecord | None = None
    for _, each in history.in_epochs(PaceRecord, PolicyRecord, CrampedRecord, EpochRecord):
        if isinstance(each, PaceRecord):
            yield f"After step {each.step} {each.why}."
        elif isinstance(each, PolicyRecord) and each.owners:
            stays = before is not None and each.owners == before.owners
            wish = "withdrew its wish" if stays else "wanted other owners"
            yield f"After step {each.step} the policy {wish}: {each.why}."
        elif isinstance(each, CrampedRecord):
            yield f"Worker {each.of} {each.why or f'has memory for a {history.job.slot_noun}, and may join'}."
        elif isinstance(each, EpochRecord):
            after = known.get(each.epoch, each)
            if before is not None and after.planned and after.owners != before.owners:
                yield _handed_over(history, known, before, after)
            before = after


def _handed_over(history: RunHistory, known: Mapping[int, EpochRecord], old: EpochRecord, new: EpochRecord) -> str:
    commits, stages = history.commits, history.job.slots
    behind = bisect_left(commits.epochs, new.epoch)  # the first commit of the epoch; the one before it began the epoch
    text = ", ".join(_ways(by_slot(old.owners, stages), by_slot(new.owners, stages), history))
    facts = [f"After step {commits.steps[behind - 1]} {text}" if behind else f"In epoch {new.epoch} {text}"]
    if sent := sum(each.bytes for each in history.of(MovedRecord) if (each.program, each.epoch) == ("heal", old.epoch)):
        facts.append(f"{size_text(sent)} of state were sent for it")

    owners_in = {number: each.owners for number, each in known.items()}

    def steps_ms(places: Iterable[int], owners: tuple[int, ...]) -> list[float]:
        """Returns the times of up to ten steps in a row with these owners, each after another such step."""
        own = takewhile(lambda place: owners_in.get(commits.epochs[place]) == owners, places)
        at_ns = [commits.at_ns[place] for place in islice(own, _MOST_STEPS + 1)]
        return [abs(one - other) / 1e6 for one, other in pairwise(at_ns)]

    was = steps_ms(range(behind - 1, -1, -1), old.owners)
    now = steps_ms(range(behind, len(commits)), new.owners)
    if min(len(was), len(now)) >= _LEAST_STEPS:
        facts.append(f"a step took {median(was):,.4g} ms before and {median(now):,.4g} ms afterwards")
    return "; ".join(facts) + "."


def _ways(before: Mapping[Slot, int], after: Mapping[Slot, int], history: RunHistory) -> Iterator[str]:
    """Yields which slots went from which worker to which."""
    ways: dict[tuple[int, int, int], list[int]] = {}
    for slot, owner in after.items():
        if owner != before[slot]:
            ways.setdefault((before[slot], owner, slot[0]), []).append(slot[1])
    for (old, new, pipeline), stages in sorted(ways.items()):
        noun = history.job.slot_noun + "s" * (len(stages) > 1)
        where = f" of pipeline {pipeline}" if history.job.pipelines > 1 else ""
        yield f"{noun} {' and '.join(spans(stages))}{where} went from worker {old} to worker {new}"

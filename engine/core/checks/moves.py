"""The moves of slots and schedules in a run, in sentences: slow workers, the wishes of the policy, and each change.

Rules: a handoff at a step boundary is followed by what was measured: the bytes of state sent to new owners, and the
median of up to ten steps with the former and with the new owners, if both have at least three. A change of owners after
a loss is no move: it is in the table of recoveries.
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
    epochs = {each.epoch: each for each in history.epochs}  # with the heirs that became known later
    before: EpochRecord | None = None
    for _, record in history.in_epochs(PaceRecord, PolicyRecord, CrampedRecord, EpochRecord):
        if isinstance(record, PaceRecord):
            yield f"After step {record.step} {record.why}."
        elif isinstance(record, PolicyRecord) and record.owners:
            stays = before is not None and record.owners == before.owners
            wish = "withdrew its wish" if stays else "wanted other owners"
            yield f"After step {record.step} the policy {wish}: {record.why}."
        elif isinstance(record, CrampedRecord):
            yield f"Worker {record.of} {record.why or f'has memory for a {history.job.slot_noun}, and may join'}."
        elif isinstance(record, EpochRecord):
            after = epochs.get(record.epoch, record)
            if before is not None and after.planned and after.owners != before.owners:
                yield _handoff(history, epochs, before, after)
            if before is not None and after.schedule != before.schedule:
                yield f"In epoch {record.epoch}: {after.reason}."
            before = after


def _handoff(history: RunHistory, epochs: Mapping[int, EpochRecord], old: EpochRecord, new: EpochRecord) -> str:
    commits, stages = history.commits, history.job.slots
    behind = bisect_left(commits.epochs, new.epoch)  # the first commit of the epoch; the one before it began the epoch
    text = ", ".join(_ways(by_slot(old.owners, stages), by_slot(new.owners, stages), history))
    facts = [f"After step {commits.steps[behind - 1]} {text}" if behind else f"In epoch {new.epoch} {text}"]
    if sent := sum(each.bytes for each in history.of(MovedRecord) if (each.program, each.epoch) == ("heal", old.epoch)):
        facts.append(f"{size_text(sent)} of state were sent for it")

    owners_in = {number: epoch.owners for number, epoch in epochs.items()}

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
    ways: dict[tuple[int, int, int], list[int]] = {}
    for slot, owner in after.items():
        if owner != before[slot]:
            ways.setdefault((before[slot], owner, slot[0]), []).append(slot[1])
    for (old, new, pipeline), stages in sorted(ways.items()):
        noun = history.job.slot_noun + "s" * (len(stages) > 1)
        where = f" of pipeline {pipeline}" if history.job.pipelines > 1 else ""
        yield f"{noun} {' and '.join(spans(stages))}{where} went from worker {old} to worker {new}"

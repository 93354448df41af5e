"""The verdict on a job of any launcher that had faults, from what it and its twin reported.

The twin is the same command without faults. A job reports steps and, of some steps, hashes of its tensors or the
tensors themselves in its checkpoints.

Rules: what was not reported is not compared, and the verdict says so. A job that resumes repeats steps, and the last
execution of a step counts: the first report of a new process voids the reports of processes that had ended, from its
step on. A job whose state differs from its twin's before the first fault does not repeat its own bits, so its bits
prove nothing. Hashes do not show how large a difference is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from engine.core.texts import counted, numbered, spans

SampleId = int | str
PartStatus = Literal["same", "within tolerance", "different", "not compared"]
_MOST_NAMED = 5  # samples or tensors in one sentence
_OWN_BITS = "the job does not repeat its own bits: different already before the first fault"
_Key = tuple[int | None, int]  # rank and step


class StepReport(NamedTuple):
    """A step that a process has finished, on the clock of CLOCK_MONOTONIC; rank None if the source does not know it.

    `process` tells the processes of a rank apart, one after another; it is empty if the source does not know it.
    """

    step: int
    at_ns: int
    rank: int | None = None
    process: str = ""
    loss: float | None = None
    samples: tuple[SampleId, ...] | None = None


class StateReport(NamedTuple):
    """The hash (hex) of each tensor of a rank after a step, by name in the order of the model."""

    step: int
    at_ns: int
    rank: int | None
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JobReports:
    """All that a job reported, the exit code of its launcher, None if unknown, and the number of unreadable lines."""

    steps: Sequence[StepReport] = ()
    states: Sequence[StateReport] = ()
    exit_code: int | None = None
    unread: int = 0


class PartVerdict(NamedTuple):
    """One part of the verdict, with a sentence."""

    part: Literal["survival", "steps", "samples", "weights", "losses"]
    status: PartStatus
    text: str


@dataclass(frozen=True, slots=True)
class ExternalVerdict:
    """The verdict in parts; `repeated` has the number of times that each repeated step was executed."""

    parts: tuple[PartVerdict, ...]
    repeated: Mapping[int, int]
    lost_steps: tuple[int, ...]
    lost_samples: tuple[SampleId, ...]
    doubled_samples: tuple[SampleId, ...]
    first_different_step: int | None

    def status(self, part: str) -> PartStatus:
        """Returns the status of a part."""
        return next(each.status for each in self.parts if each.part == part)

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as JSON values."""
        return {
            **{each.part: {"status": each.status, "text": each.text} for each in self.parts},
            "steps_repeated": {str(step): times for step, times in self.repeated.items()},
            "steps_lost": [*self.lost_steps],
            "samples_lost": [*self.lost_samples],
            "samples_doubled": [*self.doubled_samples],
            "first_different_step": self.first_different_step,
        }


def judge(
    run: JobReports,
    twin: JobReports | None,
    strikes_ns: Collection[int] = (),
    tolerance: float | None = None,
    distances: Mapping[tuple[int, str], float] | None = None,
) -> ExternalVerdict:
    """Returns the verdict on a run that had faults at some times, by CLOCK_MONOTONIC; the twin may be missing.

    `tolerance` bounds relative differences, of losses and of tensors, whose known `distances` are by (step, name).
    """
    ours, theirs = _counted(run.steps), _counted(twin.steps if twin else ())
    repeated = _repeated(run.steps, twin.steps if twin else ())
    lost, steps = _steps(run, ours, theirs, repeated)
    lost_samples, doubled, samples = _samples(ours, theirs, twin is not None)
    strike_ns = min(strikes_ns, default=None)
    first, weights = _weights(run, twin, strike_ns, tolerance, distances or {}, repeated)
    parts = (_survival(run, twin, ours, theirs), steps, samples, weights, _losses(ours, theirs, strike_ns, tolerance))
    return ExternalVerdict(parts, repeated, lost, lost_samples, doubled, first)


def _counted(reports: Iterable[StepReport]) -> dict[_Key, StepReport]:
    """Returns the execution that counts of each step of each rank."""
    ordered = sorted(reports, key=lambda report: report.at_ns)
    last_ns = {report.process: report.at_ns for report in ordered}
    goal = max((report.step for report in ordered), default=0)
    done = {report.process for report in ordered if report.step == goal}
    by_rank: dict[int | None, dict[int, StepReport]] = {}  # by rank; the steps of each ascend
    processes = set[tuple[str, int | None]]()  # processes with their ranks
    for report in ordered:
        own = by_rank.setdefault(report.rank, {})
        if (report.process, report.rank) not in processes:
            processes.add((report.process, report.rank))
            for executed in by_rank.values():
                for step, older in [*executed.items()]:
                    has_ended = last_ns[older.process] < report.at_ns and older.process not in done
                    if step >= report.step and (executed is own or has_ended):
                        del executed[step]
        while own and next(reversed(own)) > report.step:
            own.popitem()
        own[report.step] = report
    return {(rank, step): report for rank, executed in by_rank.items() for step, report in executed.items()}


def _repeated(reports: Iterable[StepReport], of_twin: Iterable[StepReport]) -> dict[int, int]:
    """Returns how often each repeated step was executed; the twin shows how many ranks report as one."""
    usual = Counter((report.rank, report.step) for report in of_twin)
    most: dict[int, int] = {}
    for key, count in Counter((report.rank, report.step) for report in reports).items():
        most[key[1]] = max(-(-count // max(1, usual[key])), most.get(key[1], 0))
    return {step: count for step, count in sorted(most.items()) if count > 1}


def _survival(
    run: JobReports, twin: JobReports | None, ours: Mapping[_Key, StepReport], theirs: Mapping[_Key, StepReport]
) -> PartVerdict:
    last, goal = (max((step for _, step in reports), default=None) for reports in (ours, theirs))
    ended = "" if run.exit_code is None else f"exit code {run.exit_code}, "
    reached = "no step was reported" if last is None else f"reached step {last}"
    if twin is not None and twin.exit_code:
        text = f"{ended}{reached}; the twin, without a fault, ended with exit code {twin.exit_code} itself"
        return PartVerdict("survival", "not compared", text)
    if run.exit_code or (goal is not None and (last is None or last < goal)):
        of = "" if goal is None else f" of {goal}"
        return PartVerdict("survival", "different", f"the job did not survive: {ended}{reached}{of}")
    if goal is None or run.exit_code is None:
        missing = "the twin reported no step" if goal is None else "the exit code is not known"
        return PartVerdict("survival", "not compared", f"{ended}{reached}; {missing}")
    return PartVerdict("survival", "same", f"the job survived: {ended}{reached}, as the twin did")


def _steps(
    run: JobReports, ours: Mapping[_Key, StepReport], theirs: Mapping[_Key, StepReport], repeated: Mapping[int, int]
) -> tuple[tuple[int, ...], PartVerdict]:
    """Returns the lost steps, and the verdict on steps."""
    if not ours:
        return (), PartVerdict("steps", "not compared", "the job reported no step")
    last = max(step for _, step in ours)
    expected = {key for key in theirs or _even(ours) if key[1] <= last}
    by_step: dict[int, set[int | None]] = {}
    for rank, step in expected - ours.keys():
        by_step.setdefault(step, set()).add(rank)
    lost = tuple(sorted(by_step))
    words = [f"{_steps_text(lost)} lost"] if lost else []
    ranks = {rank for missing in by_step.values() for rank in missing}
    if lost and ranks != {None} and ranks < {rank for rank, _ in expected}:
        words[0] += f" by {numbered('rank', sorted(ranks, key=str))}"
    if repeated:
        times = max(repeated.values())
        words.append(f"{_steps_text(repeated)} executed {'twice' if times == 2 else f'up to {times} times'}")
    words += [f"{counted(run.unread, 'line')} could not be read"] if run.unread else []
    text = "; ".join(words) or f"each of {counted(len({step for _, step in ours}), 'step')} was executed once"
    return lost, PartVerdict("steps", "different" if lost else "same", text)


def _times(count: int) -> str:
    return "twice" if count == 2 else f"up to {count} times"


def _steps_text(steps: Collection[int]) -> str:
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(spans(steps))}"


def _even(reports: Mapping[_Key, StepReport]) -> Iterator[_Key]:
    """Yields the steps that a rank would report at its usual distance, between its first and last one."""
    for rank in {rank for rank, _ in reports}:
        steps = sorted(step for of, step in reports if of == rank)
        distances = Counter(after - before for before, after in pairwise(steps))
        distance = distances.most_common(1)[0][0] if distances else 1
        yield from ((rank, step) for step in range(steps[0], steps[-1] + 1, distance))


def _samples(
    ours: Mapping[_Key, StepReport], theirs: Mapping[_Key, StepReport], has_twin: bool
) -> tuple[tuple[SampleId, ...], tuple[SampleId, ...], PartVerdict]:
    """Returns the lost and the doubled samples, and the verdict on samples."""
    last = max((step for _, step in ours), default=-1)
    ours, theirs = _naming(ours), {key: report for key, report in _naming(theirs).items() if key[1] <= last}
    for who, reports in (("the job", ours), ("the twin", theirs)):
        silent = sorted({step for (_, step), report in reports.items() if report.samples is None})
        if not reports or silent:
            why = f"{who} names no samples" if has_twin or reports else "there is no twin"
            where = f" in {_steps_text(silent)}" if silent else ""
            return (), (), PartVerdict("samples", "not compared", why + where)
    counts, goal = _sample_steps(ours), _sample_steps(theirs)
    lost = tuple(each for each, steps in goal.items() if len(counts.get(each, ())) < len(steps))
    doubled = tuple(each for each, steps in counts.items() if len(steps) > len(goal.get(each, ())))
    words = [f"{_named('sample', lost, goal)} lost"] if lost else []
    words += [f"{_named('sample', doubled, counts)} counted too often"] if doubled else []
    text = "; ".join(words) or f"the same {counted(len(counts), 'sample')} as the twin's, equally often"
    return lost, doubled, PartVerdict("samples", "different" if words else "same", text)


def _naming(reports: Mapping[_Key, StepReport]) -> dict[_Key, StepReport]:
    """Returns the reports of the ranks that name samples; in a pipeline it is one of them."""
    ranks = {rank for (rank, _), report in reports.items() if report.samples is not None}
    return {key: report for key, report in reports.items() if key[0] in ranks}


def _sample_steps(reports: Mapping[_Key, StepReport]) -> dict[SampleId, list[int]]:
    steps: dict[SampleId, list[int]] = {}
    for (_, step), report in sorted(reports.items(), key=lambda item: item[0][1]):
        for sample in report.samples or ():
            steps.setdefault(sample, []).append(step)
    return steps


def _named(noun: str, samples: Sequence[SampleId], steps: Mapping[SampleId, Sequence[int]]) -> str:
    """Returns samples in words, each with its steps, up to `_MOST_NAMED`."""
    texts = [f"{each!r} ({numbered('step', steps[each])})" for each in samples[:_MOST_NAMED]]
    more = len(samples) - len(texts)
    return f"{numbered(noun, texts)}{f' and {more} more' if more else ''}"


def _weights(
    run: JobReports,
    twin: JobReports | None,
    strike_ns: int | None,
    tolerance: float | None,
    distances: Mapping[tuple[int, str], float],
    repeated: Mapping[int, int],
) -> tuple[int | None, PartVerdict]:
    """Returns the first step with another state than the twin's, and the verdict on weights."""
    ours, theirs = (_last_states(each.states if each else ()) for each in (run, twin))
    common = sorted(ours.keys() & theirs.keys(), key=lambda key: (key[1], str(key[0])))
    if not common:
        missing = "there is no twin" if twin is None else "the twin shows none" if ours else "the job shows none"
        why = "no step in common" if ours and theirs else f"{missing} (bamboo.fingerprint, or checkpoints)"
        return None, PartVerdict("weights", "not compared", f"hashes of the state: {why}")
    differing = [key for key in common if dict(ours[key].tensors) != dict(theirs[key].tensors)]
    steps = sorted({step for _, step in common})
    compared = f"in {counted(len(steps), 'step')} up to step {steps[-1]}"
    if not differing:
        return None, PartVerdict("weights", "same", f"the same bits {compared}")
    first = differing[0]
    rank, step = first
    text = f"from step {step} on{'' if rank is None else f', first on rank {rank}'}: "
    text += _tensor_words(ours[first].tensors, theirs[first].tensors)
    before = max((each for each in steps if each < step), default=None)
    if before is not None and before < step - 1:
        text += f"; the last step with the same bits that was compared is {before}"
    if step in repeated:
        text += f"; step {step} was executed {_times(repeated[step])}"
    if strike_ns is not None and ours[first].at_ns < strike_ns:
        return step, PartVerdict("weights", "not compared", f"{_OWN_BITS}, {text}")
    if tolerance is not None:
        return step, _within(text, compared, differing, (ours, theirs), tolerance, distances)
    return step, PartVerdict("weights", "different", text)


def _last_states(states: Iterable[StateReport]) -> dict[_Key, StateReport]:
    return {(state.rank, state.step): state for state in sorted(states, key=lambda state: state.at_ns)}


def _within(
    text: str,
    compared: str,
    differing: Iterable[_Key],
    states: tuple[Mapping[_Key, StateReport], Mapping[_Key, StateReport]],
    tolerance: float,
    distances: Mapping[tuple[int, str], float],
) -> PartVerdict:
    ours, theirs = states
    places = {(key[1], name) for key in differing for name in _other_names(ours[key].tensors, theirs[key].tensors)}
    measured = {place: distances[place] for place in places if place in distances}
    (step, name), largest = max(measured.items(), key=lambda item: item[1], default=((0, ""), 0.0))
    if not largest <= tolerance:
        note = f"; the largest relative difference is {largest:.3g}, of {name!r} in step {step}, {tolerance:g} allowed"
        return PartVerdict("weights", "different", text + note)
    if len(measured) < len(places):
        note = f"; {counted(len(places) - len(measured), 'tensor')} only as hashes, which do not show how large it is"
        return PartVerdict("weights", "different", text + note)
    allowed = f"the largest relative difference is {largest:.3g}, {tolerance:g} allowed"
    return PartVerdict("weights", "within tolerance", f"{compared} {allowed}; other bits {text}")


def _other_names(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]


def _tensor_words(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Returns the tensors that differ in words; two that have each other's value are swapped."""
    names = _other_names(ours, theirs)
    swapped: dict[str, str] = {}
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            pair, crossed = (ours.get(name), ours.get(other)), (theirs.get(other), theirs.get(name))
            if None not in pair and pair == crossed and name not in swapped and other not in swapped.values():
                swapped[name] = other
    words = [f"{name!r} and {other!r} are swapped" for name, other in swapped.items()]
    plain = [name for name in names if name not in {*swapped, *swapped.values()}]
    for verb, some in (
        ("missing", [name for name in plain if name not in ours]),
        ("not in the twin", [name for name in plain if name not in theirs]),
        ("different", [name for name in plain if name in ours and name in theirs]),
    ):
        if some:
            more = len(some) - _MOST_NAMED
            named = ", ".join(map(repr, some[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
            words.append(f"{named} {'is' if len(some) == 1 else 'are'} {verb}")
    return f"{'; '.join(words)}, of {counted(len(theirs), 'tensor')}"


def _losses(
    ours: Mapping[_Key, StepReport], theirs: Mapping[_Key, StepReport], strike_ns: int | None, tolerance: float | None
) -> PartVerdict:
    pairs = [
        (ours[key], mine, its)
        for key in sorted(ours.keys() & theirs.keys(), key=lambda key: (key[1], str(key[0])))
        if (mine := ours[key].loss) is not None and (its := theirs[key].loss) is not None
    ]
    if not pairs:
        return PartVerdict("losses", "not compared", "no step with a loss in both the job and its twin")
    steps = counted(len({report.step for report, _, _ in pairs}), "step")
    # Losses are compared by their `repr`: it differs for any two floats, and nan equals nan.
    first = next((pair for pair in pairs if repr(pair[1]) != repr(pair[2])), None)
    if first is None:
        return PartVerdict("losses", "same", f"the same in {steps}")
    text = f"from step {first[0].step} on: {first[1]!r}, the twin {first[2]!r}"
    if strike_ns is not None and first[0].at_ns < strike_ns:
        return PartVerdict("losses", "not compared", f"{_OWN_BITS}, {text}")
    if tolerance is None:
        return PartVerdict("losses", "different", text)
    largest, step = max((relative(mine, its), report.step) for report, mine, its in pairs)
    note = f"; the largest relative difference is {largest:.3g} in step {step}, {tolerance:g} allowed"
    return PartVerdict("losses", "within tolerance" if largest <= tolerance else "different", text + note)


def relative(one: float, other: float) -> float:
    """Returns the relative difference of two numbers, inf if just one of them is no finite number."""
    if repr(one) == repr(other):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))

"""The workers of a run in words: the action of each, the workers that training waits for, results of a validation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.core.action import COMPUTE_OPS, Op, parse_action
from engine.core.errors import ScheduleError
from engine.core.ownership import Slot
from engine.core.texts import spans

if TYPE_CHECKING:
    from engine.runtime.agent.run_state import WorkerView


# The results of a validation pass in words.
def evaluation_words(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the loss and the metrics of each evaluation set, one text for each set; of an only set, one for each."""
    if len(sets) == 1:
        return [_loss(sets[0]), *_metrics(sets[0])]
    return [_loss(each) + (f" ({', '.join(metrics)})" if (metrics := _metrics(each)) else "") for each in sets]


def _loss(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['name']} {evaluation['loss']:.4f}"


def _metrics(evaluation: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in evaluation["metrics"].items()
    ]


# The workers of a run in a picture: the action of each, the workers that training waits for, and those that fit.
_STILL_S = 2.0  # a worker that says nothing for so long, or is in one action, may be the one that training waits for


_MOST_NAMED = 3


ELLIPSIS = "\u2026"


def doing(text: str, is_recovering: bool, noun: str) -> str:
    """Returns the present action of a worker in words: it computes, computes again, heals a slot (`noun`), or waits."""
    try:
        action = parse_action(text)
    except ScheduleError:  # none yet, or half of one: see `ProgressBoard.read`
        return text
    if action.op in COMPUTE_OPS:
        return f"replay {text}" if is_recovering else text
    if action.op is Op.HEAL:
        return f"heals {noun} {action.stage}"
    return text if action.op is Op.STEP else f"waits in {text}"


def slots_text(slots: Iterable[Slot], several: bool, heirs: Mapping[Slot, int]) -> str:
    """Returns a worker's slots, runs such as ``0-3`` or ``1.0-3``; `heirs` own some of them by now."""
    of: dict[tuple[int, int | None], list[int]] = {}
    for pipeline, stage in slots:
        of.setdefault((pipeline, heirs.get((pipeline, stage))), []).append(stage)
    return " ".join(
        (f"{pipeline}.{span}" if several else span) + ("" if heir is None else f" (now worker {heir})")
        for (pipeline, heir), stages in of.items()
        for span in spans(stages)
    )


def awaited(workers: Sequence[WorkerView]) -> str:
    """Returns the workers that training waits for, each with its silence or its action; empty if none stands out."""
    waits = []
    for view in workers:
        if view.state == "starting":
            words = view.doing and f", which {view.doing}"
            waits.append((float(bool(words)), f"worker {view.worker}{words}"))
        elif view.state in ("running", "slow") and view.silent_s >= _STILL_S:
            waits.append((view.silent_s, f"worker {view.worker}, silent for {view.silent_s:.0f} s"))
        elif view.state in ("running", "slow") and view.inside_s >= _STILL_S:
            waits.append((view.inside_s, f"worker {view.worker}, in {view.progress.action} for {view.inside_s:.0f} s"))
    waits.sort(key=lambda wait: -wait[0])
    more = [f"{len(waits) - _MOST_NAMED} more"] if len(waits) > _MOST_NAMED else []
    texts = [text for _, text in waits[:_MOST_NAMED]] + more
    return ("; " if any("," in text for text in texts) else ", ").join(texts)


def fitting(workers: Sequence[WorkerView], notable: Collection[int], most: int) -> tuple[list[WorkerView], str]:
    """Returns at most `most` workers, the `notable` ones first if there are more, and a line about the others."""
    if len(workers) <= most:
        return list(workers), ""
    ordered = sorted(workers, key=lambda view: view.worker not in notable)
    shown, others = ordered[: max(0, most - 1)], ordered[max(0, most - 1) :]
    states = sorted({each.state for each in others})
    words = (
        f"all {states[0]}"
        if len(states) == 1
        else ", ".join(f"{sum(each.state == state for each in others)} {state}" for state in states)
    )
    return shown, f"{ELLIPSIS} {len(others)} more workers, {words}"

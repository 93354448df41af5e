"""Chooses where a module is cut: around its repeated blocks, around named submodules, or into equal pieces.

Rules: a cut lies at the begin or the end of a call of a submodule, so that it has a name and stands in the trace of
training and in that of evaluation. It does not depend on the number of stages or on a clock. At most `MAX_LIVE` tensors
cross it. A piece without weights joins its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from engine.core.checkpoints.plain_names import PIECE
from engine.core.errors import Problem, UserError
from engine.models.layers import MAX_TENSORS
from engine.models.traced.pieces import Splitter
from engine.models.traced.recording import ModuleCall, Trace

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MOST_NAMES = 6


class Cut(NamedTuple):
    """The begin or the end of the call number `call` of a submodule."""

    path: str
    call: int
    is_end: bool


def choose_cuts(split: str, module: nn.Module, trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts in order; raises UserError if `split` names no submodule, or more pieces than there can be."""
    if split.isdecimal():
        return _equal(int(split), trace, splitter)
    if split:
        return _named(split, module, trace, splitter)
    once = {call.path for call in trace.calls} - {call.path for call in trace.calls if call.count}
    units = set(_units(module, "")) & once
    return _joined(_around(trace, lambda path: path in units), trace, splitter)


def place_of(cut: Cut, trace: Trace) -> int | None:
    """Returns the number of the operation before which a cut lies in a trace; None if it has no such call."""
    found = (call for call in trace.calls if (call.path, call.count) == (cut.path, cut.call))
    return next((call.last if cut.is_end else call.first for call in found), None)


def names_of(cuts: Sequence[Cut], trace: Trace) -> list[tuple[str, str]]:
    """Returns the name and the kind of each piece: those of the first submodule that is called in it."""
    edges = [0, *(place_of(cut, trace) or 0 for cut in cuts), len(trace.operations)]
    found: list[tuple[str, str]] = []
    for number, (first, last) in enumerate(pairwise(edges)):
        begins = cuts[number - 1] if number else None
        call = next((each for each in trace.calls if _begins_with(each, first, last, begins)), None)
        name = call.path if call else f"the end of {begins.path}" if begins else "its inputs"
        again = f" ({call.count + 1})" if call and call.count else ""
        found.append((f"{PIECE}{name}{again}", (call or trace.calls[0]).kind))
    return found


def _begins_with(call: ModuleCall, first: int, last: int, begins: Cut | None) -> bool:
    """Returns whether a piece is named after this call: it lies in the piece, and no call around it does."""
    if begins is not None and not begins.is_end and call.first == first:
        return (call.path, call.count) == (begins.path, begins.call)
    return bool(call.path) and first <= call.first < call.last <= last


def _units(module: nn.Module, path: str) -> Iterator[str]:
    """Yields the paths of the submodules that stay whole: blocks of containers, and others at the top."""
    for name, child in module.named_children():
        here = f"{path}.{name}".lstrip(".")
        if isinstance(child, _CONTAINERS) or _has_blocks(child):
            yield from _units(child, here)
        else:
            yield here


def _has_blocks(module: nn.Module) -> bool:
    """Returns whether a submodule holds a row of blocks: two or more of one class, with submodules of their own."""
    for each in module.modules():
        if isinstance(each, _CONTAINERS):
            kinds = [type(child) for child in each.children() if any(True for _ in child.children())]
            if len(kinds) > len(set(kinds)):
                return True
    return False


def _around(trace: Trace, is_chosen: Callable[[str], bool]) -> list[Cut]:
    """Returns the begin and the end of each chosen call, in order."""
    cuts = [
        Cut(call.path, call.count, is_end) for call in trace.calls if is_chosen(call.path) for is_end in (False, True)
    ]
    return sorted(cuts, key=lambda cut: place_of(cut, trace) or 0)


def _joined(cuts: Sequence[Cut], trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts that can be made, without those that would leave a piece without weights."""
    end, kept, before = len(trace.operations), list[Cut](), 0
    for cut in cuts:
        place = place_of(cut, trace) or 0
        if not splitter.has_weights(place, end) or not _fits(place, splitter):
            continue
        if splitter.has_weights(before, place):
            kept.append(cut)
        elif kept and len(splitter.crossing(place)) <= len(splitter.crossing(before)):
            kept[-1] = cut  # an activation stays with the layer before it
        else:
            continue
        before = place
    return kept


def _fits(place: int, splitter: Splitter) -> bool:
    return len(splitter.crossing(place)) <= MAX_TENSORS and splitter.can_cut(place)


def _named(split: str, module: nn.Module, trace: Trace, splitter: Splitter) -> list[Cut]:
    patterns = [each.strip() for each in split.split(",") if each.strip()]
    paths = list(dict.fromkeys(call.path for call in trace.calls if call.path))
    problems = [
        Problem(
            "split", f"names of submodules that the forward calls, such as {_near(each, module, paths)}", repr(each)
        )
        for each in patterns
        if not any(fnmatchcase(path, each) and each.count(".") == path.count(".") for path in paths)
    ]
    if problems:
        raise UserError(problems)
    chosen = {
        path for path in paths for each in patterns if fnmatchcase(path, each) and each.count(".") == path.count(".")
    }
    cuts = _around(trace, lambda path: path in chosen)
    for cut in cuts:
        if not _fits(place_of(cut, trace) or 0, splitter):
            crossing = len(splitter.crossing(place_of(cut, trace) or 0))
            why = f"{crossing} tensors cross it" if crossing > MAX_TENSORS else "a tensor is overwritten on both sides"
            where = f"the {'end' if cut.is_end else 'begin'} of {cut.path}"
            problems.append(Problem("split", f"cuts that at most {MAX_TENSORS} tensors cross", f"{where}: {why}"))
    if problems:
        raise UserError(problems)
    return _joined(cuts, trace, splitter)


def _near(pattern: str, module: nn.Module, paths: Iterable[str]) -> str:
    """Returns names that could be meant, the nearest first: those of the blocks, and others as deep as a pattern."""
    units = set(_units(module, ""))
    found = (each for each in paths if each in units or each.count(".") == pattern.count("."))
    names = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in each.split(".")) for each in found)
    return ", ".join(get_close_matches(pattern, names, _MOST_NAMES, cutoff=0.0))


def _equal(count: int, trace: Trace, splitter: Splitter) -> list[Cut]:
    """Returns the cuts of `count` pieces of about equal work; of places close to equal, that with least to send."""
    cuts = _joined(_around(trace, bool), trace, splitter)
    by_place = {place_of(cut, trace) or 0: cut for cut in cuts}
    if len(by_place) < count - 1:
        expected = f"at most {len(by_place) + 1}, the places where this module can be cut"
        raise UserError([Problem("split", expected, str(count), "name submodules, as in blocks.*")])
    done = [0, *accumulate(each.work for each in trace.operations)]
    chosen: list[int] = []
    places = sorted(by_place)

    def cost(place: int, goal: float) -> tuple[int, int, int]:
        away = abs(done[place] - goal) * count / done[-1]  # in pieces
        sent = sum(trace.shapes[each][1].numel() for each in splitter.crossing(place))
        return round(4 * away), sent, place

    for number in range(1, count):
        left = places[: len(places) - (count - 1 - number)]
        goal = done[-1] * number / count
        free = [each for each in left if each > (chosen[-1] if chosen else 0)]
        chosen.append(min(free, key=partial(cost, goal=goal)))
    return [by_place[each] for each in chosen]

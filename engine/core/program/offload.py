"""The pass that offloads residuals: it adds their copies to the host, behind forwards, and back, before backwards.

The residual that is used last leaves, right behind its forward. It comes back during the last forward before its
backward, or the last action; it stays until the backward for the weights. So 1F1B on the first of 4 workers has two
residuals on the device at once:

    0F0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0B0 0RELOAD1 0F4 0OFFLOAD4 0B1 0RELOAD2 0F5 ...

Rule: copies are beside computing. A worker takes the lowest peak at which its line, without waits for others, gets no
longer by more than `_SLACK`; so a slow link carries fewer residuals, and none if it is too slow. After Wan et al.,
PipeOffload (arXiv 2503.01328), section 3. A worker's copies are its own: no other program depends on them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain
from math import inf
from typing import NamedTuple

from engine.core.action import (
    COMPUTE_OPS,
    FORWARD_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    STASH_OPS,
    Action,
    Op,
    Program,
    make_action,
)
from engine.core.errors import required
from engine.core.program.dry_run import Cost, HostLink, peak_stash, unit_costs

_SLACK = 0.01
_ALL = 1 << 30


class _Rule(NamedTuple):
    """Which residuals leave, and how soon they come back."""

    newest: int  # so many, made last, leave after all others: there was little time for their copies
    ahead: int  # in actions with these ops
    ops: Collection[Op] = FORWARD_OPS


_RULES = (_Rule(0, 1), _Rule(_ALL, 1), _Rule(1, 2), _Rule(2, 3))
_SPLIT_RULES = (_Rule(0, 1, COMPUTE_OPS), _Rule(0, 2, COMPUTE_OPS), _Rule(1, 2, COMPUTE_OPS))  # beside a W
_LEAST = 2  # residuals: one that a forward makes, and one for the backward behind it

Stash = tuple[int, int, int]  # pipeline, stage, microbatch


def with_copy_times(copy_time: float, cost: Cost = unit_costs) -> Cost:
    """Returns the costs with those of copies to the host and back: `copy_time` forwards of the stage each."""

    def copied(action: Action) -> float:
        is_copy = action.op in STASH_OPS
        return copy_time * cost(action._replace(op=Op.F)) if is_copy else cost(action)

    return copied


def with_offloads(program: Program, copy_time: float | None) -> Program:
    """Returns a program with the copies of each worker; as it is where `copy_time`, in forwards, is None."""
    if copy_time is None:
        return program
    return {worker: line_with_offloads(actions, copy_time) for worker, actions in program.items()}


def line_with_offloads(
    actions: Sequence[Action], copy_time: float, here: Collection[Stash] = (), away: Collection[Stash] = ()
) -> tuple[Action, ...]:
    """Returns the actions of one worker with its copies; residuals are `here` or `away` on the host at the start."""
    line, num_here = tuple(actions), len(here)
    cost = with_copy_times(copy_time)
    length = _length(line, cost, num_here)
    rules = (*_RULES, *_SPLIT_RULES) if any(action.op is Op.W for action in line) else _RULES
    best = line if not away else required(_placed(line, _ALL, here, away, _RULES[0]), "nothing has to leave")
    low, high = _LEAST, peak_stash(best, num_here)
    while low < high:
        limit = (low + high) // 2
        placed = [_placed(line, limit, here, away, rule) for rule in rules]
        lengths = [(_length(each, cost, num_here), each) for each in placed if each is not None]
        if lengths and min(lengths)[0] <= length * (1 + _SLACK):
            high, best = limit, min(lengths)[1]
        else:
            low = limit + 1
    return best


def _length(actions: Sequence[Action], cost: Cost, stashed: int) -> float:
    """Returns how long a worker takes that never waits for another."""
    link, free_at = HostLink(actions, stashed), 0.0
    for action in actions:
        took = cost(action)
        start = link.start(action, free_at, took)
        free_at = start if action.op in STASH_OPS else start + took
    return free_at


def _placed(
    line: Sequence[Action], limit: int, here: Collection[Stash], away: Collection[Stash], rule: _Rule
) -> tuple[Action, ...] | None:
    """Returns the actions with the copies that keep at most `limit` residuals; None if there are no such copies."""
    placing = _Placing(line, limit, here, away, rule)
    if not all(map(placing.takes, range(len(line)))):
        return None
    return placing.joined()


class _Placing:
    """One walk over the actions of a worker, with the residuals on its device as far as the walk has come."""

    def __init__(
        self, line: Sequence[Action], limit: int, here: Collection[Stash], away: Collection[Stash], rule: _Rule
    ):
        self._line, self._limit = line, limit
        self._to_make = {_stash(action) for action in line if action.op in FORWARD_OPS}  # also again, in a recovery
        self._away = set(away) - self._to_make
        self._newest, self._ahead, ops = rule
        self._counts = [*accumulate((action.op in ops for action in line), initial=0)]  # before a position
        self._use: dict[Stash, int] = {}  # the position of the backward, or its part for the input
        self._made: dict[Stash, int] = dict.fromkeys(here, -1)
        self._order: list[tuple[int, Stash]] = []
        for position, action in enumerate(line):
            if action.op in FORWARD_OPS:
                self._made[_stash(action)] = position
            elif action.op is Op.B or action.op is Op.I:
                self._use[_stash(action)] = position
                self._order.append((position, _stash(action)))
        self._order.reverse()
        self._halves = {_stash(action) for action in line if action.op is Op.W}
        self._here = set(here)
        self._pending: set[Stash] = set()  # backwards for the weights are left
        self._leave: dict[int, list[Stash]] = {}  # by position, which they stand behind
        self._come: dict[int, list[Stash]] = {}  # by position, which they stand before
        self._returned: set[Stash] = set()

    def takes(self, position: int) -> bool:
        """Goes on over the action at a position; says whether the residuals fit."""
        action = self._line[position]
        op, stash = action.op, _stash(action)
        if op not in COMPUTE_OPS:
            return True
        while self._order and self._order[-1][0] <= position:
            self._order.pop()
        is_forward, is_used = op in FORWARD_OPS, op is Op.B or op is Op.I
        if is_used and stash in self._away and not self._comes(stash, position, {stash}):
            return False
        wanted = {stash}
        for use, following in self._order[: -1 - self._ahead : -1]:
            if (
                following not in self._here | self._away
                or self._counts[use] - self._counts[position + 1] >= self._ahead
            ):
                break
            wanted.add(following)
            if following in self._away and not self._comes(following, position, wanted, more=is_forward):
                break
        if is_forward:
            if not self._makes_room(stash not in self._here, wanted):
                return False
            self._here.add(stash)
            self._to_make.discard(stash)
        elif is_used:
            self._here.discard(stash)
            self._pending |= {stash} & self._halves
        else:
            self._pending.discard(stash)
        return True

    def _comes(self, stash: Stash, position: int, wanted: Collection[Stash], more: int = 0) -> bool:
        if not self._makes_room(1 + more, wanted):
            return False
        self._away.discard(stash)
        self._here.add(stash)
        self._returned.add(stash)
        while position and self._line[position - 1].op in RECEIVE_OPS:
            position -= 1
        self._come.setdefault(position, []).append(stash)
        return True

    def _makes_room(self, num: int, wanted: Collection[Stash]) -> bool:
        """Lets residuals leave until there is room for `num`, those that are used last first."""
        too_many = len(self._here) + len(self._pending) + num - self._limit
        if too_many <= 0:
            return True
        free = self._here - self._returned - self._to_make - set(wanted)
        may_leave = sorted(free, key=lambda stash: (self._use.get(stash, inf), stash), reverse=True)
        if len(may_leave) < too_many:
            return False
        if self._newest:
            may_leave.sort(key=self._made.__getitem__, reverse=True)
        for stash in (*may_leave[self._newest :], *reversed(may_leave[: self._newest]))[:too_many]:
            self._here.discard(stash)
            self._away.add(stash)
            self._leave.setdefault(self._behind(self._made[stash]), []).append(stash)
        return True

    def _behind(self, position: int) -> int:
        """Returns the position of the last send of the forward at a position."""
        while 0 <= position < len(self._line) - 1 and self._line[position + 1].op in SEND_OPS:
            position += 1
        return position

    def joined(self) -> tuple[Action, ...]:
        """Returns the actions with the copies."""
        parts: list[Iterable[Action]] = [_copies(Op.OFFLOAD, self._leave.get(-1, ()))]
        for position, action in enumerate(self._line):
            parts.append(_copies(Op.RELOAD, self._come.get(position, ())))
            parts.append((action,))
            parts.append(_copies(Op.OFFLOAD, self._leave.get(position, ())))
        return tuple(chain.from_iterable(parts))


def _stash(action: Action) -> Stash:
    return action.pipeline, action.stage, action.microbatch


def _copies(op: Op, stashes: Iterable[Stash]) -> list[Action]:
    return [make_action(stage, op, microbatch, pipeline) for pipeline, stage, microbatch in stashes]

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

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    make_action,
)
from engine.core.errors import required
from engine.core.program.dry_run import Cost, HostLink, peak_stash, stash_of, unit_costs
from engine.core.value import Kind, Value

_SLACK = 0.01
_ALL = 1 << 30


class _Rule(NamedTuple):
    """Which residuals leave, and how soon they come back."""

    newest: int  # so many, made last, leave after all others: there was little time for their copies
    ahead: int  # in actions with these ops
    ops: Collection[Op] = FORWARD_OPS


_RULES = (_Rule(0, 1), _Rule(_ALL, 1), _Rule(1, 2), _Rule(2, 3))
_SPLIT_RULES = tuple(_Rule(newest, ahead, COMPUTE_OPS) for newest in (0, 1) for ahead in (1, 2))  # beside a W
_LEAST = 2  # residuals: one that a forward makes, and one for the backward behind it


def with_copy_times(copy_time: float, cost: Cost = unit_costs) -> Cost:
    """Returns the costs with those of copies to the host and back: `copy_time` forwards of the stage each."""
    return lambda action: copy_time * cost(action._replace(op=Op.F)) if action.op in STASH_OPS else cost(action)


def line_with_offloads(
    actions: Sequence[Action],
    copy_time: float,
    slices: int = 1,
    here: Collection[Value] = (),
    away: Collection[Value] = (),
) -> tuple[Action, ...]:
    """Returns the actions of one worker with its copies, which take so many forwards.

    Residuals are `here` or `away` on the host at the start.
    """
    line, at_start = _Line(tuple(actions), slices, here, away), (len(here), slices)
    cost = with_copy_times(copy_time)
    length = _length(line.actions, cost, *at_start)
    rules = (*_RULES, *_SPLIT_RULES) if any(action.op is Op.W for action in line.actions) else _RULES
    best = line.actions if not away else required(_placed(line, _ALL, _RULES[0]), "nothing has to leave")
    low, high = _LEAST, peak_stash(best, len(here))
    while low < high:
        limit = (low + high) // 2
        placed = [_placed(line, limit, rule) for rule in rules]
        lengths = [(_length(each, cost, *at_start), each) for each in placed if each is not None]
        if lengths and min(lengths)[0] <= length * (1 + _SLACK):
            high, best = limit, min(lengths)[1]
        else:
            low = limit + 1
    return best


def _length(actions: Sequence[Action], cost: Cost, stashed: int, slices: int) -> float:
    """Returns how long a worker takes that never waits for another."""
    link, free_at = HostLink(actions, stashed, slices), 0.0
    for action in actions:
        took = cost(action)
        start = link.start(action, free_at, took)
        free_at = start if action.op in STASH_OPS else start + took
    return free_at


class _Line:
    """The actions of a worker, and when each residual, or what is left of it for the weights, is made and used."""

    def __init__(self, actions: tuple[Action, ...], slices: int, here: Collection[Value], away: Collection[Value]):
        self.actions, self.here = actions, here
        self.to_make = {stash_of(action) for action in actions if action.op in FORWARD_OPS}  # also again, in a recovery
        self.away = set(away) - self.to_make
        self.computed: list[tuple[int, Value, Value | None]] = []  # position, the stash, what is left for the weights
        self.use: dict[Value, int] = {}  # the position of the backward, or its part
        self.made: dict[Value, int] = dict.fromkeys(here, -1)  # from where on it may leave
        reads = []
        halves = {stash_of(action) for action in actions if action.op is Op.W}
        for position, action in enumerate(actions):
            if action.op not in COMPUTE_OPS:
                continue
            stash, left = stash_of(action, slices), stash_of(action._replace(op=Op.W))
            self.computed.append((position, stash, left if action.op is Op.I and left in halves else None))
            if action.op not in FORWARD_OPS:
                self.use[stash] = position
                self.made |= {left: position} if action.op is Op.I else {}
                continue
            self.made[stash] = position
            before = stash._replace(index=stash.index - 1)
            if stash.index % slices and before in self.away:  # a slice reads the states of the one before
                reads.append((position, before))
            elif stash.index % slices:
                self.made[before] = position
        self.order = sorted([*((use, stash) for stash, use in self.use.items()), *reads], reverse=True)


def _placed(line: _Line, limit: int, rule: _Rule) -> tuple[Action, ...] | None:
    """Returns the actions with the copies that keep at most `limit` residuals; None if there are no such copies."""
    placing = _Placing(line, limit, rule)
    return placing.joined() if all(placing.takes(*each) for each in line.computed) else None


class _Placing:
    """One walk over the actions of a worker, with what is stashed on its device as far as the walk has come."""

    def __init__(self, line: _Line, limit: int, rule: _Rule):
        self._line, self._actions, self._limit = line, line.actions, limit
        self._newest, self._ahead, ops = rule
        self._counts = [*accumulate((action.op in ops for action in line.actions), initial=0)]  # before a position
        self._to_make, self._here, self._away = set(line.to_make), set(line.here), set(line.away)
        self._order = list(line.order)
        self._leave: dict[int, list[Value]] = {}  # by position, which they stand behind
        self._come: dict[int, list[Value]] = {}  # by position, which they stand before
        self._returned: set[Value] = set()

    def takes(self, position: int, stash: Value, left: Value | None) -> bool:
        """Goes on over the action at a position; says whether the residuals fit."""
        is_forward, wanted, number = self._actions[position].op in FORWARD_OPS, {stash}, 0
        while self._order and self._order[-1][0] <= position:
            wanted.add(used := self._order.pop()[1])
            if used in self._away and not self._comes(used, position, wanted):
                return False
        for use, following in reversed(self._order):
            if number == self._ahead or self._counts[use] - self._counts[position + 1] >= self._ahead:
                break
            is_away = following in self._away
            if is_away or following in self._here:
                number += 1
                wanted.add(following)
            if is_away and not self._comes(following, position, wanted, more=is_forward):
                break
        if is_forward:
            if not self._makes_room(stash not in self._here, position, wanted):
                return False
            self._here.add(stash)
            self._to_make.discard(stash)
        else:
            self._here.discard(stash)
            if left is not None:
                self._here.add(left)
        return True

    def _comes(self, stash: Value, position: int, wanted: Collection[Value], more: int = 0) -> bool:
        if not self._makes_room(1 + more, position, wanted):
            return False
        self._away.discard(stash)
        self._here.add(stash)
        self._returned.add(stash)
        while position and self._actions[position - 1].op in RECEIVE_OPS:
            position -= 1
        self._come.setdefault(position, []).append(stash)
        return True

    def _makes_room(self, num: int, position: int, wanted: Collection[Value]) -> bool:
        """Lets residuals leave until there is room for `num`, those that are used last first."""
        too_many = len(self._here) + num - self._limit
        if too_many <= 0:
            return True
        free = self._here - self._returned - self._to_make - set(wanted)
        may_leave = sorted(
            (stash for stash in free if self._line.made[stash] < position),
            key=lambda stash: (self._line.use.get(stash, inf), stash),
            reverse=True,
        )
        if len(may_leave) < too_many:
            return False
        if self._newest:
            may_leave.sort(key=self._line.made.__getitem__, reverse=True)
        for stash in (*may_leave[self._newest :], *reversed(may_leave[: self._newest]))[:too_many]:
            self._here.discard(stash)
            self._away.add(stash)
            self._leave.setdefault(self._behind(self._line.made[stash]), []).append(stash)
        return True

    def _behind(self, position: int) -> int:
        """Returns the position of the last send of the action at a position."""
        while 0 <= position < len(self._actions) - 1 and self._actions[position + 1].op in SEND_OPS:
            position += 1
        return position

    def joined(self) -> tuple[Action, ...]:
        """Returns the actions with the copies."""
        parts: list[Iterable[Action]] = [_copies(_LEAVES, self._leave.get(-1, ()))]
        for position, action in enumerate(self._actions):
            parts.append(_copies(_COMES, self._come.get(position, ())))
            parts.append((action,))
            parts.append(_copies(_LEAVES, self._leave.get(position, ())))
        return tuple(chain.from_iterable(parts))


_LEAVES = {Kind.RESIDUAL: Op.OFFLOAD, Kind.PENDING: Op.OFFLOAD_W}
_COMES = {Kind.RESIDUAL: Op.RELOAD, Kind.PENDING: Op.RELOAD_W}


def _copies(ops: Mapping[Kind, Op], stashes: Iterable[Value]) -> list[Action]:
    return [make_action(stage, ops[kind], microbatch, pipeline) for kind, pipeline, stage, microbatch in stashes]

"""Which rank of a job is silent, without a word from it: by its processor time, its state, its sockets and its steps.

Rules: a rank stands still if its process used less than a fiftieth of a core for `STILL_NS`, while no rank reported a
step. Ranks that wait for a silent one stand still too. So a rank is called silent only for what a waiting one has not:
it is stopped or stuck in the kernel, it leaves bytes of its peers unread, or it is behind their step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

STILL_NS = 1_000_000_000
_WORKS = 50  # a waiting process works for less than this part of the time
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel", "Z": "a zombie"}


class RankSign(NamedTuple):
    """What the kernel shows of a process: its processor time, the letter of its state, the bytes unread in its sockets.

    `step` is the newest that the rank has reported, -1 if none.
    """

    pid: int
    cpu_ns: int
    state: str
    unread: int
    step: int = -1


@dataclass(slots=True)
class SilenceWatch:
    """The ranks that stand still, from signs that come in the order of their times; a step of any rank ends all."""

    _since: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by rank: pid, time, processor time
    _known: dict[int, str] = field(default_factory=dict)  # pid -> why it is silent, of those that `look` has returned

    def step(self) -> None:
        """Forgets what was seen before a step."""
        self._since.clear()
        self._known.clear()

    def look(self, signs: Mapping[int, RankSign], now_ns: int) -> dict[int, tuple[int, str]]:
        """Returns the ranks that stand still, since when and why, or "": once per step, and again with a reason."""
        for rank, sign in signs.items():
            pid, since_ns, cpu_ns = self._since.get(rank, (0, 0, 0))
            if pid != sign.pid or (sign.cpu_ns - cpu_ns) * _WORKS > max(STILL_NS, now_ns - since_ns):
                self._since[rank] = sign.pid, now_ns, sign.cpu_ns
        for rank in self._since.keys() - signs.keys():
            del self._since[rank]
        newest = max((sign.step for sign in signs.values()), default=-1)
        still = {rank: since for rank, (_, since, _) in self._since.items() if now_ns - since >= STILL_NS}
        news = {rank: (since_ns, _why(signs[rank], newest)) for rank, since_ns in sorted(still.items())}
        news = {rank: (since_ns, why) for rank, (since_ns, why) in news.items() if self._is_news(signs[rank].pid, why)}
        self._known |= {signs[rank].pid: why for rank, (_, why) in news.items()}
        return news

    def _is_news(self, pid: int, why: str) -> bool:
        return pid not in self._known or bool(why and not self._known[pid])


def _why(sign: RankSign, newest: int) -> str:
    if sign.state in _STATES:
        return _STATES[sign.state]
    if sign.unread:
        return f"{sign.unread:,} bytes of its peers unread"
    return f"its newest step is {sign.step}, that of others {newest}" if -1 < sign.step < newest else ""

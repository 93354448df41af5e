"""The status of a run on a terminal or in a pipe: a headline, a table of workers, the verdicts, the words explained.

Rules: a terminal that watches is drawn anew in place, and the last picture stays. A pipe gets a picture only if it
differs from the one before by more than the ages of messages.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from bamboo_cli.tables import BAD, STATE_STYLES, can_redraw, console, fitted, width_of
from bamboo_cli.worker_rows import slots_text

if TYPE_CHECKING:
    from engine.core.protocol.run_status import RunStatus, WorkerStatus

_WORDS = {"in": "at work"}  # the state of a worker -> its word for a reader, if it is another
_LATE_S = 3.0  # a launcher writes to its store each second; this much later, the picture says so
_TITLES = ("worker", "state", "stages", "stages before", "step", "last action", "silent s", "pid")
_NUMERIC = (True, False, False, False, True, False, True, True)


class StatusPicture:
    """Shows the status of a run, once or again and again; a context manager, so that a terminal is restored."""

    def __init__(self, watch: bool):
        self._console = console()
        self._live = None
        if watch and can_redraw():
            self._live = Live(console=self._console, auto_refresh=False)
        self._shown: RunStatus | None = None

    def __enter__(self) -> StatusPicture:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, found: RunStatus, live: bool) -> None:
        """Shows a status; `live` tells whether it is from the store of the run."""
        workers = tuple(replace(each, heard_s_ago=None) for each in found.workers)
        ageless = replace(found, workers=workers, unwritten_s=_LATE_S if _is_late(found) else None)
        if self._live is not None:
            self._live.update(_picture(found, live), refresh=True)
        elif ageless != self._shown:
            self._console.print(_picture(found, live))
        self._shown = ageless


def _picture(found: RunStatus, live: bool) -> RenderableType:
    several = any(pipeline for each in found.workers for pipeline, _ in (*each.now, *each.before))
    parts: list[RenderableType] = [Text(headline(found, live))]
    if found.workers:
        parts.append(_table(found, several))
    parts += (Text(f"epoch {epoch}: {reason}") for epoch, reason in found.verdicts)
    parts += map(Text, found.policy)
    parts += [Text(found.deadly, BAD)] if found.deadly else []
    parts += map(Text, found.gaps)
    if found.workers:
        parts.append(Text(_explanation(found.noun, several), style="dim"))
    return Group(*parts)


def _table(found: RunStatus, several: bool) -> RenderableType:
    rows = [_row(each, found, several) for each in found.workers]
    filled = [place for place in range(len(_TITLES)) if any(row[place] for row in rows)]
    return fitted(
        [_TITLES[place].replace("stages", f"{found.noun}s") for place in filled],
        [_NUMERIC[place] for place in filled],
        [[row[place] for place in filled] for row in rows],
        width_of(),
    )


def headline(found: RunStatus, live: bool) -> str:
    """Returns the phase, epoch, step and loss of a run in a line."""
    steps = f"step {found.committed + 1} of {found.num_steps}" if found.num_steps else "no step yet"
    if found.data_epoch:
        steps += f" (epoch {found.data_epoch} of {found.data_epochs} of the data)"
    loss = "" if found.loss is None else f", loss {found.loss:.4f}"
    late = f", no word from the launcher for {found.unwritten_s:.1f} s" if _is_late(found) else ""
    closed = "" if found.injectable else ", takes no faults (--injectable no)"
    told = f"{found.run_id}: {found.phase}, epoch {found.epoch}, {steps}{loss}{closed}{late}"
    return told + ("" if live else " (from events)")


def _is_late(found: RunStatus) -> bool:
    return found.unwritten_s is not None and found.unwritten_s > _LATE_S


def _row(each: WorkerStatus, found: RunStatus, several: bool) -> tuple[str | Text, ...]:
    style = STATE_STYLES.get(each.state, "")
    heirs = {slot: other.worker for other in found.workers for slot in other.now if other is not each}
    return (
        Text(str(each.worker), style),
        Text(_WORDS.get(each.state, each.state), style),
        slots_text(each.now, several, {}),
        slots_text(each.before, several, heirs) if each.before != each.now else "",
        str(each.step) if each.step >= 0 else "",
        each.last_action,
        "" if each.heard_s_ago is None else f"{each.heard_s_ago:.1f}",
        str(each.pid),
    )


def _explanation(noun: str, several: bool) -> str:
    slots = f"{noun}s: those that a worker computes{f', as pipeline.{noun}' if several else ''}"
    return f"{slots}; silent: since its last message; epoch: counts the changes of members"

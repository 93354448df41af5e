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
_TITLES = ("worker", "state", "stages", "stages before", "step", "last action", "silent s", "tensors MiB", "pid")
_NUMERIC = (True, False, False, False, True, False, True, True, True)


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

    def show(self, status: RunStatus, live: bool) -> None:
        """Shows a status; `live` tells whether it is from the store of the run."""
        workers = tuple(replace(each, heard_s_ago=None) for each in status.workers)
        ageless = replace(status, workers=workers, unwritten_s=_LATE_S if _is_late(status) else None)
        if self._live is not None:
            self._live.update(_picture(status, live), refresh=True)
        elif ageless != self._shown:
            self._console.print(_picture(status, live))
        self._shown = ageless


def _picture(status: RunStatus, live: bool) -> RenderableType:
    several = any(pipeline for each in status.workers for pipeline, _ in (*each.now, *each.before))
    parts: list[RenderableType] = [Text(headline(status, live))]
    if status.workers:
        parts.append(_table(status, several))
    parts += (Text(f"epoch {epoch}: {reason}") for epoch, reason in status.verdicts)
    parts += map(Text, status.policy)
    parts += [Text(status.deadly, BAD)] if status.deadly else []
    parts += map(Text, status.gaps)
    if status.workers:
        parts.append(Text(_explanation(status.noun, several), style="dim"))
    return Group(*parts)


def _table(status: RunStatus, several: bool) -> RenderableType:
    rows = [_row(worker, status, several) for worker in status.workers]
    filled = [place for place in range(len(_TITLES)) if any(row[place] for row in rows)]
    return fitted(
        [_TITLES[place].replace("stages", f"{status.noun}s") for place in filled],
        [_NUMERIC[place] for place in filled],
        [[row[place] for place in filled] for row in rows],
        width_of(),
    )


def headline(status: RunStatus, live: bool) -> str:
    """Returns the phase, epoch, step and loss of a run in a line."""
    steps = f"step {status.committed + 1} of {status.num_steps}" if status.num_steps else "no step yet"
    if status.data_epoch:
        steps += f" (epoch {status.data_epoch} of {status.data_epochs} of the data)"
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    late = f", no message from the launcher for {status.unwritten_s:.1f} s" if _is_late(status) else ""
    closed = "" if status.injectable else ", takes no faults (--injectable no)"
    line = f"{status.run_id}: {status.phase}, epoch {status.epoch}, {steps}{loss}{closed}{late}"
    return line + ("" if live else " (from events)")


def _is_late(status: RunStatus) -> bool:
    return status.unwritten_s is not None and status.unwritten_s > _LATE_S


def _row(worker: WorkerStatus, status: RunStatus, several: bool) -> tuple[str | Text, ...]:
    style = STATE_STYLES.get(worker.state, "")
    heirs = {slot: other.worker for other in status.workers for slot in other.now if other is not worker}
    return (
        Text(str(worker.worker), style),
        Text(_WORDS.get(worker.state, worker.state), style),
        slots_text(worker.now, several, {}),
        slots_text(worker.before, several, heirs) if worker.before != worker.now else "",
        str(worker.step) if worker.step >= 0 else "",
        worker.last_action,
        "" if worker.heard_s_ago is None else f"{worker.heard_s_ago:.1f}",
        f"{worker.tensor_bytes / 2**20:,.1f}" if worker.tensor_bytes else "",
        str(worker.pid),
    )


def _explanation(noun: str, several: bool) -> str:
    slots = f"{noun}s: those that a worker computes{f', as pipeline.{noun}' if several else ''}"
    return f"{slots}; silent: since its last message; epoch: counts the changes of members"

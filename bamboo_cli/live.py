"""Shows a run on stderr while it goes on: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from bamboo_cli.echo import echo
from bamboo_cli.tables import STATE_STYLES, can_redraw, console, fitted
from bamboo_cli.worker_rows import awaited, doing, evaluation_words, fitting, slots_text
from engine.core.job.job import Job
from engine.core.job.samples import epoch_at, passes
from engine.core.texts import printable
from engine.files.run_folder import RunFolder
from engine.harness.live_recoveries import GONE, LiveRecoveries
from engine.harness.screen import Screen
from engine.runtime.agent.run_state import RunState, RunView, WorkerView
from engine.runtime.process.early_sigint import ANSWER
from engine.runtime.process.interrupts import Interrupts, present

# The output of workers as lines with the number of the worker, read from the logs that the workers write.
#
# Rules: a worker never waits for a reader. A look reads a few kilobytes for all workers together, and leaves out the
# rest of a flood; a line says how much. A line without its end waits for it until the run has ended.

_MOST_BYTES = 16_384  # of a look
_MOST_OF_LINE = 1_000
_MOST_OF_BLOCK = 4_000  # bytes: a pipe that select calls writable takes 4096 without a wait


class WorkerOutput:
    """Follows ``worker-N.log`` in the logs of one run."""

    def __init__(self, logs: Path, *, is_json: bool = False):
        self._logs, self._is_json = logs, is_json
        self._read: dict[Path, int] = {}
        self._begun: dict[Path, bytes] = {}  # a line whose end has not come

    def news(self, *, is_last: bool = False) -> Iterator[str]:
        """Yields the lines since the last call in blocks that a pipe takes whole; with `is_last` also unended lines."""
        paths = sorted(self._logs.glob("worker-*.log"), key=_worker)
        block = ""
        for line in (line for path in paths for line in self._news_of(path, _MOST_BYTES // len(paths), is_last)):
            if block and len(block.encode()) + len(line.encode()) > _MOST_OF_BLOCK:
                yield block
                block = ""
            block += f"\n{line}" if block else line
        if block:
            yield block

    def _news_of(self, path: Path, most_bytes: int, is_last: bool) -> Iterator[str]:
        start, prefix = self._read.get(path, 0), f"[{_worker(path)}] "
        try:
            size = path.stat().st_size
            if size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    self._begun[path] = self._begun.get(path, b"") + file.read(min(size - start, most_bytes))
        except OSError:
            return  # a run must not end because of its picture
        self._read[path] = max(size, start)
        left_out = size - start - most_bytes
        *lines, rest = self._begun.pop(path, b"").split(b"\n")
        if is_last or left_out > 0 or len(rest) > _MOST_OF_LINE:
            lines += [rest] if rest else []
        else:
            self._begun[path] = rest
        for part in (part for line in lines for part in (_message(line) if self._is_json else (line,))):
            yield prefix + _shown(part)
        if left_out > 0:
            yield f"{prefix}... {left_out} bytes are left out; the full output is in {path}"


def _worker(path: Path) -> int:
    return int(path.stem.removeprefix("worker-"))


def _message(line: bytes) -> list[bytes]:
    """Returns the lines of the message in a line of JSON, or any other line as it is."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        return [part.encode(errors="replace") for part in json.loads(line)["message"].split("\n")]
    return [line]


def _shown(line: bytes) -> str:
    """Returns a line as text; of a line that was written over, the last version."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    shown = printable(text)
    return shown if len(shown) <= _MOST_OF_LINE else f"{shown[:_MOST_OF_LINE]}..."


_PLAIN_EVERY_S = 2.0  # at first; without a new step, each line waits twice as long as the one before
_SAME_START_EVERY_S = 30.0
_STILL_S = 3.0  # without a new step, after which the line names the workers that training waits for
_RATE_OVER_S = 3.0
_TOLD: set[str] = set()  # the recoveries that stay on the terminal of this process
_TITLES = ("worker", "pid", "stages", "state", "step", "action", "microbatches/s")
_NUMERIC = (True, True, False, False, True, False, True)
_NARROW = 80  # columns, below which lines wrap, and the last column, the rate, has no room
# XTWINOPS of xterm, which most terminals know: keep the title, and take it back.
_KEEP_TITLE, _OLD_TITLE = "\x1b[22;0t", "\x1b[23;0t"
_NO_TITLE = "\x1b]0;\x07"  # where a terminal keeps none
_OTHER_LINES = 5  # of a picture: progress (it may wrap), bar, titles, the note about workers that do not fit


def _starting(view: RunView) -> frozenset[str]:
    """Returns what workers that start do, without times, and how many of them there are; nothing once all are ready."""
    late = [each.doing.partition(" for ")[0] for each in view.workers if each.state == "starting"]
    return frozenset([*late, str(len(late))] if late else ())


class LivePicture:
    """Shows views of a run; a context manager, so that an error restores the terminal too."""

    def __init__(self, job: Job, events: Path, *, tee: bool = False):
        self.job = job
        self._name, self._title = events.parent.name, ""
        self._num_unshown = 0  # characters of the output of workers
        self._output = WorkerOutput(RunFolder(events.parent).logs, is_json=job.log_format == "json") if tee else None
        self._recoveries = LiveRecoveries(job, events, ThreadPoolExecutor(1))
        self._console = console(err=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._is_terminal = can_redraw(err=True)
        self._said_s, self._said = 0.0, frozenset[str]()
        self._starting = frozenset[str]()
        self._run_state: RunState | None = None  # of the last view
        self._num_notes = 0
        self._interrupts: Interrupts | None = None  # that leave the answer to this picture
        self._history: deque[tuple[float, dict[int, int], int]] = deque()
        self._moved_s = time.monotonic()  # when the last step was committed, or training began
        self._num_epochs = 0
        self._recovering_at = -1  # the number of steps that were committed when the open step was interrupted

    def __enter__(self) -> LivePicture:
        if self._is_terminal:
            self._write(_KEEP_TITLE)
            self._live.start()
            self._interrupts = present()
            if self._interrupts is not None:
                self._interrupts.has_picture = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_terminal:
            with contextlib.suppress(OSError):
                self._live.stop()
                self._write(f"{_NO_TITLE}{_OLD_TITLE}")
        if self._interrupts is not None:
            self._interrupts.picture_ends()

    def show(self, view: RunView) -> None:
        """Shows one view: redraws the table, or prints a line if the last one is some seconds old."""
        # A lost terminal must not end the run; the hang-up signal decides about that.
        with contextlib.suppress(OSError):
            self._show(view)

    def _show(self, view: RunView) -> None:
        now_s = time.monotonic()
        computed = {each.worker: each.progress.num_computed for each in view.workers}
        num_steps = view.run_state.committed + 1
        starting = _starting(view)
        if not self._history or self._history[-1][2] != num_steps or self._starting != starting:
            self._moved_s = now_s
            self._starting = starting
        self._history.append((now_s, computed, num_steps))
        if len(view.run_state.epochs) > self._num_epochs:
            self._recovering_at = num_steps if self._num_epochs else -1
            self._num_epochs = len(view.run_state.epochs)
        while now_s - self._history[0][0] > _RATE_OVER_S:
            self._history.popleft()
        self._run_state = view.run_state
        if view.is_interrupted and self._interrupts is not None and not self._interrupts.is_answered:
            self._interrupts.is_answered = True
            self._say(ANSWER)
        self._tell_notes()
        for text in self._recoveries.look(view):
            self._say(text)
            _TOLD.update([text] * self._is_terminal)
        self._tell_output()
        if self._is_terminal:
            self._live.update(self._picture(view), refresh=True)
            self._entitle(num_steps, is_interrupted=view.is_interrupted)
        elif now_s - self._said_s >= max(self._every_s(), self._said_s - self._moved_s):
            self._said_s, self._said = now_s, starting
            echo(self._line(view), err=True)

    def _every_s(self) -> float:
        """Returns the least seconds between two lines: one that says nothing new about the start can wait."""
        return _SAME_START_EVERY_S if self._starting and self._said == self._starting else _PLAIN_EVERY_S

    def _entitle(self, num_steps: int, *, is_interrupted: bool) -> None:
        """Puts the progress, and the time left of a run that goes on, into the title of the terminal."""
        title = f"{self._name}: step {num_steps}/{self.job.steps}"
        if (left_s := self._left_s(num_steps)) is not None and not is_interrupted:
            title += f", {timedelta(seconds=round(left_s))} left"
        if title != self._title:
            self._console.set_window_title(title)
            self._title = title

    def _write(self, codes: str) -> None:
        self._console.file.write(codes)
        self._console.file.flush()

    def close(self) -> None:
        """Shows the notes and the output of workers that came after the last view."""
        with contextlib.suppress(OSError):
            self._tell_notes()
            for text in self._recoveries.lines(is_last=True):
                self._say(text)
            self._tell_output(is_last=True)

    def _tell_output(self, *, is_last: bool = False) -> None:
        """Prints what workers have printed; leaves it out while stderr takes nothing, because the run must go on."""
        for block in self._output.news(is_last=is_last) if self._output is not None else ():
            if not select.select([], [sys.stderr], [], 0)[1]:
                self._num_unshown += len(block)
                continue
            if self._num_unshown:
                self._say(f"... {self._num_unshown} characters of output are left out: stderr was not read", style="")
                self._num_unshown = 0
            self._say(block, style="")

    def _tell_notes(self) -> None:
        notes = self._run_state.notes if self._run_state is not None else []
        for text in notes[self._num_notes :]:
            self._say(text)
        self._num_notes = len(notes)

    def _say(self, text: str, style: str = "bold") -> None:
        """Prints a lasting line, on a terminal above the table."""
        if self._is_terminal:
            self._console.print(Text(text, style=style))
        else:
            echo(text, err=True)

    def _line(self, view: RunView) -> str:
        return ("stopping: " if view.is_interrupted else "") + self._progress(view)

    def _progress(self, view: RunView) -> str:
        run_state = view.run_state
        if not run_state.losses:
            late = [each for each in view.workers if each.state == "starting"]
            ready = f"{len(view.workers) - len(late)} of {len(view.workers)} workers ready"
            first = "predicting" if self.job.predict_args else f"step 0/{self.job.steps}{self._wait(view)}"
            return f"starting: {ready}; waiting for {awaited(late)}" if late else first
        text = f"step {run_state.committed + 1}/{self.job.steps}"
        if epoch := epoch_at(self.job, run_state.committed + 1, run_state.samples):
            text = f"epoch {epoch}/{self.job.epochs}  {text}"
        elif run_state.samples:
            text += f"  epoch {passes(self.job, run_state.committed + 1, run_state.samples):.2f}"
        text += f"  loss {run_state.losses[-1]:.4f}"
        if run_state.validations:
            sets = run_state.validations[max(run_state.validations)]
            text += "".join(f"  {each}" for each in evaluation_words([asdict(each) for each in sets]))
        return text + (self._wait(view) or ("" if view.is_interrupted else self._time_left(run_state.committed + 1)))

    def _wait(self, view: RunView) -> str:
        """Returns for how long no step was committed, and the workers that training waits for; empty at first."""
        still_s = self._history[-1][0] - self._moved_s
        if still_s < _STILL_S or view.run_state.committed + 1 == self.job.steps:
            return ""
        workers = awaited(view.workers)
        return f"  no step for {still_s:.0f} s" + (f": waiting for {workers}" if workers else "")

    def _time_left(self, num_steps: int) -> str:
        left_s = self._left_s(num_steps)
        if left_s is None:
            return ""
        first_s, _, first_steps = self._history[0]
        rate = (num_steps - first_steps) / (self._history[-1][0] - first_s)
        return f"  {rate:.1f} steps/s  {left_s:.0f} s left"

    def _left_s(self, num_steps: int) -> float | None:
        """Returns the seconds until the last step, at the rate of the last seconds; None without a step in them."""
        first_s, _, first_steps = self._history[0]
        elapsed_s, done = self._history[-1][0] - first_s, num_steps - first_steps
        return elapsed_s * (self.job.steps - num_steps) / done if done > 0 and elapsed_s > 0 else None

    def _picture(self, view: RunView) -> Group:
        notable = [each.worker for each in view.workers if each.state != "running" or self._has_inherited(each)]
        is_narrow = self._console.width < _NARROW
        shown, others = fitting(view.workers, notable, self._console.height - _OTHER_LINES - 3 * is_narrow)
        is_recovering = self._recovering_at == view.run_state.committed + 1
        titles = [f"{self.job.slot_noun}s" if each == "stages" else each for each in _TITLES]
        num_columns = len(titles) - is_narrow
        rows = [self._row(each, is_recovering)[:num_columns] for each in shown]
        table = fitted(titles[:num_columns], _NUMERIC[:num_columns], rows, self._console.width)
        bar = ProgressBar(total=self.job.steps, completed=view.run_state.committed + 1, width=40)
        # A small screen cuts off the end, so the table is last. The padding ends the line of the bar.
        return Group(Text(self._line(view)), Padding(bar, 0), table, *([Text(others, style="dim")] if others else []))

    def _has_inherited(self, worker: WorkerView) -> bool:
        return not set(self._recoveries.slots(worker.worker)) <= set(worker.slots)

    def _row(self, worker: WorkerView, is_recovering: bool) -> tuple[str | Text, ...]:
        first_s, first, _ = self._history[0]
        elapsed_s = self._history[-1][0] - first_s
        # A microbatch counts two computations: forward and backward.
        rate = (worker.progress.num_computed - first.get(worker.worker, 0)) / 2 / elapsed_s if elapsed_s > 0 else 0.0
        style = STATE_STYLES.get(worker.state, "")
        row_style = style if worker.state in GONE else ""
        return (
            Text(str(worker.worker), style=row_style),
            Text(str(worker.pid), style=row_style),
            Text(self._stages(worker), style=row_style),
            Text(worker.state, style=style),
            str(worker.progress.step),
            worker.progress.action
            if worker.state in GONE
            else doing(worker.progress.action, is_recovering, self.job.slot_noun),
            f"{rate:.1f}",
        )

    def _stages(self, worker: WorkerView) -> str:
        """Returns the slots of a worker, or its last slots with their new owners."""
        heirs = {slot: owner for slot, owner in self._recoveries.owners.items() if owner != worker.worker}
        return slots_text(self._recoveries.slots(worker.worker), self.job.pipelines > 1, heirs)


def untold(lines: Iterable[str], *, err: bool) -> list[str]:
    """Returns lines for stdout, or stderr, without the beginnings that a picture has left on the same terminal."""
    if not (sys.stderr if err else sys.stdout).isatty():
        return list(lines)
    rests = []
    for line in lines:
        beginning = max((each for each in _TOLD if line.startswith(each)), key=len, default="")
        rests.append(line.removeprefix(beginning).removeprefix(", "))
    return [rest for rest in dict.fromkeys(rests) if rest]


@contextlib.contextmanager
def _picture(job: Job, events: Path, *, tee: bool) -> Iterator[Callable[[RunView], None]]:
    with LivePicture(job, events, tee=tee and not RunFolder(events.parent).is_of_twin) as picture:
        yield picture.show
        picture.close()


def screen(*, tee: bool = False) -> Screen:
    """Returns the screen of a command; with `tee` it also shows what the workers of a run print, but of no twin."""
    return Screen(partial(echo, err=True), partial(_picture, tee=tee))

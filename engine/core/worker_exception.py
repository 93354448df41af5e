"""An exception that ended a worker, as data: its text, its place in the job, and the line of the user's own code."""

from __future__ import annotations

from dataclasses import dataclass

GPU_ERROR, GPU_MEMORY = "GPU error", "GPU out of memory"
INJECTED = ", injected by fault "  # behind one of them
_MOST_CHARACTERS = 300  # of the text of an exception in a sentence


@dataclass(frozen=True, slots=True)
class WorkerException:
    """One exception; a field is empty, and `line` 0, if it is not known.

    `error` is its type and text. `place` is the part of the job that raised it: ``layer 2 (fc2)``, ``the loss``, ``the
    data`` or ``the factory mine:small``. `file`, `line` and `function` name the innermost line of the user's own code.
    `frames` has the frames of the user with their source, innermost first; it counts those of bamboo and torch.
    `microbatch` names the microbatch of a forward or a backward in training, and its samples. `gpu` is the trouble of
    the worker's GPU that the exception tells, in words that begin with `GPU_ERROR` or `GPU_MEMORY`; else empty.
    """

    error: str
    place: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    frames: str = ""
    traceback: str = ""
    microbatch: str = ""
    gpu: str = ""

    @property
    def kind(self) -> str:
        """The text that two exceptions with one cause share; the size that does not fit into a GPU is none of it."""
        return self.gpu.partition(":")[0] if self.gpu.startswith(GPU_MEMORY) else self.gpu or self.error

    @property
    def is_injected(self) -> bool:
        """Whether it tells the trouble of a GPU that a fault has made."""
        return INJECTED in self.gpu

    def in_step(self, step: int) -> str:
        """Returns the exception as words that follow "worker N", with the step and the line of code.

        A step below 0 means before training.
        """
        place = f", in {self.place}" if self._place_is_news() else ""
        when = ", before step 0" if step < 0 else f" of step {step}" if place else f", in step {step}"
        microbatch = f", {self.microbatch}" if self.microbatch else ""
        return f"{self._ended()}{place}{when}{microbatch}{self._line()}"

    def in_verdict(self) -> str:
        """Returns the exception as words that follow "worker N", without the line of code."""
        return f"{self._ended()}{f', in {self.place}' if self._place_is_news() else ''}"

    def at_start(self) -> str:
        """Returns the exception as a mistake that was found before training: its place first, then its text."""
        places = ", ".join(filter(None, [self.place if self._place_is_news() else "", self.microbatch]))
        return f"{f'in {places}: ' if places else ''}{self._short()}{self._line()}"

    def _place_is_news(self) -> bool:
        """Returns whether the place is known, and the text does not name it itself."""
        return bool(self.place) and self.place not in self.error

    def _ended(self) -> str:
        return f"ended with {self._short()}" if self.gpu else f"raised {self._short()}"

    def _short(self) -> str:
        text = " ".join((self.gpu or self.error).split())
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."

    def _line(self) -> str:
        function = f", in {self.function}" if self.function else ""
        return f" ({self.file}:{self.line}{function})" if self.file else ""

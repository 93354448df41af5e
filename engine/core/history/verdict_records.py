"""The records of a run about its judgement: the comparison with its twin, the checks and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.history.record import StampedRecord

Result = Literal["passed", "failed", "invalid", "not judged"]  # the last one: a signal came before


DATA_PART = "data"  # the part of a difference between two microbatches


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a run and its twin: in a layer after a step, in the loss or the data of the step.

    `part` is the part that differs, in words; `tensor` is the first tensor of it that differs, or empty if that is not
    known. Where the data differ, `tensor` is the first microbatch. `run` and `twin` are the beginnings of hashes, or
    losses.
    """

    step: int
    layer: int | None  # None for the loss and the data
    part: str
    tensor: str
    run: str
    twin: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        kind = "" if self.part == DATA_PART else "tensor "
        tensor = f", {kind}{self.tensor}" if self.tensor else ""
        values = f"{self.run} in this run and {self.twin} in its twin"
        return f"step {self.step}{layer}{tensor}: different {self.part}, {values}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparingRecord(StampedRecord):
    """Training is over, and the run is to be compared with its twin, which may have to be run first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRecord(StampedRecord):
    """The losses of the fault-free twin, as (step, loss)."""

    losses: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRecord(StampedRecord):
    """The run was compared with its twin in `compared` of `steps` steps; `last_step` is -1 if no step was compared.

    A step without hashes in one of the runs is not compared: for instance, a worker died before it reported them.
    `difference` is None if all compared hashes are equal. In the step `disturbed` the first fault struck, or the first
    worker was lost; None in a run without either.
    """

    compared: int
    steps: int
    last_step: int
    difference: Difference | None
    disturbed: int | None

    @property
    def is_random(self) -> bool:
        """Whether run and twin differ before the first fault: then the model itself is not deterministic."""
        if self.difference is None:
            return False
        return self.disturbed is None or self.difference.step < self.disturbed

    @property
    def as_told(self) -> str:
        """The words of a reader that has this record alone, and not the hashes that prove it."""
        found = "no difference" if self.difference is None else f"a difference in step {self.difference.step}"
        return f"compared with its twin as it ended, {self.compared} of {self.steps} steps: {found}"

    def __str__(self) -> str:
        if self.difference is None:
            return f"weights identical to the run without the fault, {self.compared} of {self.steps} steps"
        text = f"the weights are not those of the fault-free twin: {self.difference}"
        if not self.is_random:
            return text
        is_data = self.difference.part == DATA_PART
        when = (
            "there was no fault" if self.disturbed is None else f"it differs before the fault of step {self.disturbed}"
        )
        cause = "the data are not deterministic, they use" if is_data else "the model is not deterministic, it uses"
        return f"{text}; {when}: {cause} something random that bamboo does not seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotComparedRecord(StampedRecord):
    """The weights were not compared with those of a twin."""

    why: str

    def __str__(self) -> str:
        return f"weights not compared: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRecord(StampedRecord):
    """The files of the evidence at the end of the command, that of events up to here: path, bytes, hashes of parts."""

    files: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord(StampedRecord):
    """A check of the run, or of a request of `bamboo inject --run`: its name, its result, the reason in words."""

    name: str
    result: Result
    text: str
    request: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord(StampedRecord):
    """The verdict over all checks of the run, or of a request, and the exit code of the command that judged."""

    result: Result
    exit_code: int
    request: str = ""

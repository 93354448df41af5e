"""What `bamboo.hf.Trainer` gives its workers as files: the model, and the microbatches of a whole training in order.

A folder is named by the hash of its content. So a resumed training with other data is refused, and equal ones share it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.core.texts import counted
from engine.files.atomic_write import make_folder, storage_errors, write_named
from engine.models.data_sources import TARGETS
from engine.models.losses import IGNORED
from engine.models.trainer_batches import PER_FILE, narrowed, place_of
from engine.runtime.checkpoint.export import as_safetensors

LoadedBatch = Mapping[str, Any]
StepBatches = tuple[Sequence[LoadedBatch], Tensor | None]
ITEMS = "num_items_in_batch"  # the parameter of a forward for the number of targets by which its loss is divided


class StepPlan(NamedTuple):
    """The steps of a training: `batches` and `steps_per_epoch` of a pass, and the `accumulated` batches of a step."""

    batches: int
    accumulated: int
    steps_per_epoch: int
    steps: int

    def steps_of(self, loader: Any, take: Callable[[Iterator[Any], int], StepBatches]) -> Iterator[StepBatches]:
        """Yields the batches of each step, in the order of a loader; the last step of a pass may have fewer.

        `take` returns the next batches of a pass, at most so many, with their number of items.
        """
        num_steps = 0
        for epoch in count():
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            batches = iter(loader)
            while (step := take(batches, self.accumulated))[0]:
                yield step
                num_steps += 1
                if num_steps == self.steps:
                    return


def kept_folder(place: Path, kind: str, write: Callable[[Path], object]) -> Path:
    """Returns a folder ``KIND-HASH`` at a place, with what `write` has written; raises StorageError if it cannot be."""
    make_folder(place, place.parent)
    temporary = place / f".{kind}.{os.urandom(8).hex()}"
    with storage_errors("write", place):
        temporary.mkdir(mode=0o700)
        try:
            write(temporary)
            digest = hashlib.sha256()
            for path in sorted(temporary.iterdir()):
                with path.open("rb") as file:
                    digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
            folder = place / f"{kind}-{digest.hexdigest()[:16]}"
            if not folder.exists():
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


class BatchWriter:
    """Writes the microbatches of a training, `per_step` of them for each step, with at most `rows` rows.

    `counts` returns for a batch whether the model divides its loss by a number of items. Then each microbatch has its
    share of that of its step, as the loss of the step is the mean over its microbatches.
    """

    def __init__(self, per_step: int, rows: int, counts: Callable[[LoadedBatch], bool]):
        self._per_step, self._rows = per_step, rows
        self._counts, self._is_counted = counts, False
        self.adds_losses = False  # as transformers does if a model gets a number of items and ignores it
        self._shapes: dict[str, set[tuple[int, ...]]] = {}  # of each column, without its rows

    def write(self, steps: Iterable[StepBatches], folder: Path) -> None:
        """Writes all files; raises UserError for batches that no microbatches of one shape can stand for."""
        batches = (batch for step, items in steps for batch in self._whole_step(step, items))
        number = 0
        while part := list(islice(batches, PER_FILE)):
            tensors = {
                f"{place_of(number + index)[1]}{name}": narrowed(column)
                for index, batch in enumerate(part)
                for name, column in batch.items()
            }
            write_named(folder / place_of(number)[0], as_safetensors(tensors))
            number += len(part)

    def _whole_step(self, step: Sequence[LoadedBatch], items: Tensor | None) -> Iterator[dict[str, Tensor]]:
        self._is_counted = self._is_counted if self._shapes else items is not None and self._counts(step[0])
        self.adds_losses = items is not None and not self._is_counted
        share = {ITEMS: torch.as_tensor(items).cpu().float() / self._per_step} if self._is_counted else {}
        batches = [self._columns(batch) for batch in step]
        without = {name: each[:1] for name, each in batches[-1].items()}
        without |= {name: torch.full_like(each, IGNORED) for name, each in without.items() if name in TARGETS}
        missing = self._per_step - len(batches)
        fewest = min(each.shape[0] for batch in batches for each in batch.values())
        if not share and (missing or fewest < self._rows):
            hint = "use dataloader_drop_last, and a number of batches that gradient_accumulation_steps divides"
            expected = (
                f"{self._per_step} batches of {self._rows} in each step of a model whose loss is a mean over rows"
            )
            actual = f"{counted(len(batches), 'batch', 'batches')}, the smallest of {counted(fewest, 'row')}"
            raise UserError([Problem("train_dataset", expected, actual, hint)])
        for batch in [*batches, *[without] * missing]:
            yield batch | share

    def _columns(self, batch: LoadedBatch) -> dict[str, Tensor]:
        columns = {name: each.cpu() for name, each in batch.items() if isinstance(each, Tensor)}
        if not columns.keys() & {*TARGETS}:
            expected = f"a column of targets ({', '.join(TARGETS)})"
            raise UserError([Problem("train_dataset", expected, ", ".join(columns))])
        for name, each in columns.items():
            self._shapes.setdefault(name, set()).add(tuple(each.shape[1:]))
        return columns

    def lengths(self) -> str:
        """Returns the longest row of each column whose rows differ in length, as `WrittenBatches` takes them.

        Raises UserError for columns that cannot be filled.
        """
        different = {name: shapes for name, shapes in self._shapes.items() if len(shapes) > 1}
        wrong = [name for name, shapes in different.items() if any(len(shape) != 1 for shape in shapes)]
        if wrong or (different and "attention_mask" not in self._shapes):
            actual = f"several sizes of {', '.join(wrong or different)}"
            hint = "pad all rows to one length (padding='max_length')"
            expected = "batches of one size, or rows of tokens with an attention_mask"
            raise UserError([Problem("data_collator", expected, actual, hint)])
        return ",".join(f"{name}={max(shapes)[0]}" for name, shapes in sorted(different.items()))

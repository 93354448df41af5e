"""The commits of a run in columns: a long run has millions, and a record of each would take four times the memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from engine.core.history.run_records import CommitRecord


class Commits(Sequence[CommitRecord]):
    """Commits in the order of the file; `places` has the number of other records before each, `epochs` its epoch."""

    def __init__(self) -> None:
        self.steps, self.at_ns, self.places, self.epochs = array("q"), array("q"), array("q"), array("q")
        self.losses, self.grad_norms, self._clip_factors = array("d"), array("d"), array("d")
        self._writers: dict[int, tuple[int, int]] = {}  # index -> worker and pid, where they change
        self._last: set[int] = set()  # indexes of commits that no step follows

    def add(self, commit: CommitRecord, place: int, epoch: int) -> None:
        """Adds the next commit."""
        writer = (commit.worker, commit.pid)
        if not self._writers or self._writers[max(self._writers)] != writer:
            self._writers[len(self)] = writer
        if commit.last:
            self._last.add(len(self))
        self.steps.append(commit.step)
        self.at_ns.append(commit.at_ns)
        self.places.append(place)
        self.epochs.append(epoch)
        self.losses.append(commit.loss)
        self.grad_norms.append(commit.grad_norm)
        self._clip_factors.append(commit.clip_factor)

    def add_fields(self, commits: Sequence[tuple[str, ...]], place: int, epoch: int) -> None:
        """Adds the next commits, each as the texts of the fields in its line; raises ValueError for another text."""
        workers, pids, at_ns, steps, losses, grad_norms, clip_factors, lasts = zip(*commits, strict=True)
        writer = (int(workers[0]), int(pids[0]))
        if not self._writers or self._writers[max(self._writers)] != writer:
            self._writers[len(self)] = writer
        self._last.update(len(self) + number for number, last in enumerate(lasts) if last == "true")
        self.steps.extend(map(int, steps))
        self.at_ns.extend(map(int, at_ns))
        self.losses.extend(map(float, losses))
        self.grad_norms.extend(map(float, grad_norms))
        self._clip_factors.extend(map(float, clip_factors))
        self.places.extend([place] * len(commits))
        self.epochs.extend([epoch] * len(commits))

    def forget_after(self, step: int) -> None:
        """Drops the commits behind a step: they are lost, and come again."""
        length = len(self)
        while length and self.steps[length - 1] > step:
            length -= 1
        for counts in (self.steps, self.at_ns, self.places, self.epochs):
            del counts[length:]
        for numbers in (self.losses, self.grad_norms, self._clip_factors):
            del numbers[length:]
        self._writers = {index: writer for index, writer in self._writers.items() if index < length}
        self._last = {index for index in self._last if index < length}

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> CommitRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[CommitRecord]: ...

    def __getitem__(self, index: int | slice) -> CommitRecord | list[CommitRecord]:
        if isinstance(index, slice):
            return [self._record(each) for each in range(*index.indices(len(self)))]
        return self._record(range(len(self))[index])

    def __iter__(self) -> Iterator[CommitRecord]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> CommitRecord:
        worker, pid = self._writers[max(each for each in self._writers if each <= index)]
        return CommitRecord(
            worker=worker,
            pid=pid,
            at_ns=self.at_ns[index],
            step=self.steps[index],
            loss=self.losses[index],
            grad_norm=self.grad_norms[index],
            clip_factor=self._clip_factors[index],
            last=index in self._last,
        )

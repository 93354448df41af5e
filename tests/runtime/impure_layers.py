"""Layers that keep what is no buffer, or draw from elsewhere, in one way each; and layers that only look as if."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from tests.runtime.small_jobs import WIDTH, Block


class Linear(nn.Module):
    """A linear map: what the layers here have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x)
        return made


class Counting(Linear):
    """Counts its forwards in an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class OwnGenerator(Linear):
    """Is seldom left out by a generator of its own, which every copy of it begins with alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.stream = torch.Generator().manual_seed(3)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand((), generator=vars(self.linear)["stream"])
        return x if drawn < 1e-6 else super().forward(x)


class OwnPython(Linear):
    """The same with one of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = random.Random(3)  # noqa: S311

    def forward(self, x: Tensor) -> Tensor:
        return x if self.stream.random() < 1e-6 else super().forward(x)


class OwnNumpy(Linear):
    """The same with numpy's, of the newer kind and of the older one."""

    def __init__(self) -> None:
        super().__init__()
        self.newer, self.older = np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.newer.random() if x.requires_grad else self.older.rand()
        return x if drawn < 1e-6 else super().forward(x)


class FirstSeen(Linear):
    """Keeps the mean of the first microbatch that it sees."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean()
        return super().forward(x) - self.mean


class TellsGradient(Linear):
    """Scales the gradient by the newest input, which need not be that of the backward."""

    newest = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.newest = x.detach().mean()
        made = super().forward(x)
        made.register_hook(lambda gradient: gradient * self.newest)
        return made


class SeldomRandom(Linear):
    """Is left out once in a million forwards, by Python's random."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 1e-6 else super().forward(x)  # noqa: S311


class SeldomNumpy(Linear):
    """The same by numpy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 1e-6 else super().forward(x)


class RandomBuilt(Linear):
    """Draws a constant from Python's random when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.is_left_out = random.random() < 1e-6  # noqa: S311


class DrawsInBackward(Linear):
    """Draws from torch's default generator where nothing seeds it."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        made.register_hook(lambda gradient: gradient * torch.rand(()))
        return made


class Clock(Linear):
    """Adds the time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + time.time() % 1


class ReadsAndWrites(Linear):
    """Counts its forwards in a file."""

    def __init__(self) -> None:
        super().__init__()
        handle, name = tempfile.mkstemp(prefix="counted-")
        os.write(handle, b"1")
        os.close(handle)
        self.path = Path(name)

    def forward(self, x: Tensor) -> Tensor:
        count = int(self.path.read_text())
        self.path.write_text(str(count + 1))
        return super().forward(x) / count

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class Tired(Linear):
    """Raises in its third forward."""

    left = 2

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise OSError("planted")
        return super().forward(x)


class Numbered(Linear):
    """Has a number of its own, in the order of construction."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        Numbered.count += 1
        self.number = Numbered.count

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number


class Averaging(Linear):
    """Moves a parameter in its forward, as if it were a buffer; what it returns does not show that."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(1.0)
        return super().forward(x)


class OfProcess(Linear):
    """Depends on the process that it is in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * os.getpid()


IMPURE: dict[str, tuple[type[nn.Module], str]] = {
    "attribute": (Counting, "its output of microbatch 0 differs when its forward is redone: a forward changes calls"),
    "generator": (OwnGenerator, "its forward of microbatch 0 draws from the generator linear.stream"),
    "python's": (OwnPython, "its forward of microbatch 0 draws from the generator stream"),
    "numpy's": (OwnNumpy, "its forward of microbatch 0 draws from the generator newer"),
    "first": (FirstSeen, "differs in a copy that has not run the forwards before it: a forward changes mean"),
    "order": (TellsGradient, "its input gradient of microbatch 1 differs in a second copy, in another order"),
    "random": (SeldomRandom, "its forward of microbatch 0 draws from Python's random"),
    "numpy": (SeldomNumpy, "its forward of microbatch 0 draws from numpy's generator"),
    "constructor": (RandomBuilt, "its constructor draws from Python's random"),
    "backward": (DrawsInBackward, "its backward of microbatch 1 draws from torch's default generator"),
    "time": (Clock, "its output of microbatch 0 differs when its forward is redone"),
    "file": (ReadsAndWrites, "its output of microbatch 0 differs when its forward is redone"),
    "raises": (Tired, "it raises OSError when its forward is redone: planted"),
    "construction": (Numbered, "differs in a copy that has not run the forwards before it"),
    "parameter": (Averaging, "its weight differs after a forward and a backward"),
}


class Shared(Linear):
    """Has one buffer under two names, in two modules: it writes by one, and reads by the other."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.linear.register_buffer("sum", self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        return super().forward(x) + self.linear.get_buffer("sum")


class Remembering(Linear):
    """Keeps what others may look at, and a table that it makes once; neither changes a bit."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH).sin()
        self.newest = super().forward(x) + self.table
        return self.newest


class Reseeding(Linear):
    """Draws from streams that it has seeded itself: the same numbers each time. Another one it only has."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.unused = torch.Generator(), np.random.RandomState()

    def forward(self, x: Tensor) -> Tensor:
        random.seed(5)
        np.random.seed(5)
        self.own.manual_seed(5)
        drawn = random.random() * np.random.rand()  # noqa: S311
        return super().forward(x) * drawn * torch.rand((), generator=self.own)


class Logarithm(Linear):
    """Makes numbers that are none of what is drawn for it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log()


class Picky(Counting):
    """Takes no negative numbers, which training never brings; and counts."""

    def forward(self, x: Tensor) -> Tensor:
        assert (x >= 0).all()
        return super().forward(x)


class Checkpointed(Linear):
    """Recomputes its forward in the backward, with the same dropout."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        made: Tensor = checkpoint(lambda x: nn.functional.dropout(self.linear(x), 0.4), x, use_reentrant=False)
        return made


PURE: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Block,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "hooked spectral": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "shared": Shared,
    "remembering": Remembering,
    "reseeding": Reseeding,
    "logarithm": Logarithm,
    "checkpointed": Checkpointed,
}


def between(middle: Callable[[], nn.Module]) -> Model:
    """Returns a model that has two such layers, 1 and 2, between linear maps."""
    first = LayerSpec("first", "Linear", partial(nn.Linear, WIDTH, WIDTH))
    last = LayerSpec("last", "Linear", partial(nn.Linear, WIDTH, 1))
    return Model((first, LayerSpec("one", "Middle", middle), LayerSpec("other", "Middle", middle), last), default_loss)


def counting() -> Model:
    """Counts its forwards."""
    return between(Counting)


def of_process() -> Model:
    """Depends on its process."""
    return between(OfProcess)


def listed() -> Sequence[nn.Module]:
    """Has layers that are copies of one that keeps its own generator."""
    return [nn.Linear(WIDTH, WIDTH), OwnGenerator(), nn.Linear(WIDTH, 1)]

"""Token sequences of different lengths, and models for them: layers, and ordinary modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.data import DataFacts, keyed_generator
from engine.models.layers import Batch

VOCABULARY, WIDTH = 13, 8


class Lengths:
    """Microbatches of 1 to 4 rows and 2 to 12 tokens; some targets do not count."""

    facts = DataFacts(task="causal", vocabulary=VOCABULARY, sequence=12)

    def __init__(self, seed: int):
        self.seed = seed

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        return self._drawn("train", step, pipeline, microbatch)

    def validation(self, index: int, size: int) -> Batch:
        return self._drawn("validation", index)

    def _drawn(self, *key: int | str) -> Batch:
        draws = keyed_generator(self.seed, *key)
        rows, length = (int(torch.randint(least, most, (), generator=draws)) for least, most in ((1, 5), (2, 13)))
        tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=draws)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=draws) < 0.3] = -100
        return Batch((tokens[:, :-1].clone(),), (targets,))


class Mixer(nn.Module):
    """Attends to earlier tokens; it reads the sizes of its input, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.inward(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.outward(F.dropout(mixed.transpose(1, 2).reshape(rows, length, width), 0.1, self.training))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


def layers() -> list[nn.Module]:
    """Makes the layers of a small language model."""
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)]


class Ordinary(nn.Module):
    """The same as one module, whose forward is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Fixed(Ordinary):
    """Its own forward reads the length: a record would keep that of the first microbatch."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.arange(tokens.shape[1]).view(1, -1, 1)

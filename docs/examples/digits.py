"""A classifier of drawn digits: a data set of your own, an evaluation set, a metric, epochs."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FONT = (  # rows of three pixels
    "###|#.#|#.#|#.#|###", ".#.|##.|.#.|.#.|###", "###|..#|###|#..|###", "###|..#|.##|..#|###", "#.#|#.#|###|..#|..#",
    "###|#..|###|..#|###", "###|#..|###|#.#|###", "###|..#|.#.|.#.|.#.", "###|#.#|###|#.#|###", "###|#.#|###|..#|###",
)  # fmt: skip
GLYPHS = torch.tensor([[[float(pixel == "#") for pixel in row] for row in glyph.split("|")] for glyph in FONT])


class Digits(Dataset[tuple[Tensor, int]]):
    """Pictures of 1x8x8 pixels: a digit at a random place, with noise. Sample `index` is always the same."""

    classes = 10

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)  # ends `for sample in digits`
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        label, top, left = (int(torch.randint(end, (), generator=generator)) for end in (10, 4, 6))
        picture = 0.2 * torch.randn(1, 8, 8, generator=generator)
        picture[0, top : top + 5, left : left + 3] += GLYPHS[label]
        return picture, label


def sets(count: int = 1600) -> dict[str, Dataset[tuple[Tensor, int]]]:
    """Returns the set to train on, and one to measure; their samples differ."""
    return {"train": Digits(count, seed=1), "test": Digits(count // 8, seed=2)}


def classifier(width: int = 16) -> nn.Sequential:
    """Returns a network whose entries are the layers that stages are made of."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.05)),
        nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(32 * width, 4 * width), nn.ReLU()),
        nn.Linear(4 * width, 10),
    )


def top2(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    """Returns how often the right digit is among the first two."""
    return (outputs[0].topk(2).indices == targets[0][:, None]).any(dim=1).float().mean()

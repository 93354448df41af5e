"""Images with class labels, kept as bytes in memory and converted to floats in 0..1 per microbatch."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.core.errors import EnvironmentLacksError
from engine.models.data import DataFacts, keyed_generator, training_generator
from engine.models.layers import Batch

NUM_CLASSES = 10  # of all sources here


class ImageData:
    """Samples from two disjoint sets of (images, labels): images are uint8 [n, channels, height, width], up to `peak`.

    A `size` other than 0 scales the images to size x size.
    """

    def __init__(
        self, training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], *, seed: int, peak: int, size: int = 0
    ):
        self.training_set, self.validation_set = training, validation
        self.seed, self.peak = seed, peak
        self.evaluation_sets = {"validation": len(validation[1])}
        channels, height, width = training[0].shape[1:]
        self.facts = DataFacts(
            task="classify", num_classes=NUM_CLASSES, channels=channels, height=size or height, width=size or width
        )

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` images of the training set, drawn with replacement."""
        generator = training_generator(self.seed, step, pipeline, microbatch)
        return self._samples(self.training_set, torch.randint(len(self.training_set[1]), (size,), generator=generator))

    def validation(self, index: int, size: int) -> Batch:
        """Returns the next `size` images of the validation set in its order, cyclically."""
        return self._samples(
            self.validation_set, torch.arange(index * size, (index + 1) * size) % len(self.validation_set[1])
        )

    def _samples(self, image_set: tuple[Tensor, Tensor], chosen: Tensor) -> Batch:
        images = image_set[0][chosen].float() / self.peak
        height_width = (self.facts.height, self.facts.width)
        if images.shape[-2:] != height_width:
            images = F.interpolate(images, height_width, mode="bilinear", align_corners=False)
        return Batch((images,), (image_set[1][chosen],))


def split(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns (training, validation): four fifths and one fifth by a permutation that does not depend on the seed."""
    order = torch.randperm(len(labels), generator=keyed_generator(0, "split"))
    training, validation = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (images[training], labels[training]), (images[validation], labels[validation])


def digits(seed: int, *, size: int = 8) -> ImageData:
    """Opens scikit-learn's handwritten digits: 1797 gray images of 8x8, 16 shades, scaled to size x size.

    Reads the file that scikit-learn ships, without the import, which takes each worker more than a second. Raises
    EnvironmentLacksError if scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise EnvironmentLacksError(
            "the digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        )
    table = gzip.decompress((Path(package.origin).parent / "datasets/data/digits.csv.gz").read_bytes())
    rows = torch.tensor([[int(value) for value in line.split(b",")] for line in table.split()], dtype=torch.uint8)
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
    training, validation = split(images, labels)
    return ImageData(training, validation, seed=seed, peak=16, size=size)

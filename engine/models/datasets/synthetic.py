"""Random data that can be learned, for every task, generated from the job's seed.

Vectors are drawn for each microbatch; a text or images once, when the source is opened.
"""

from __future__ import annotations

import torch

from engine.models.data import DataFacts, Task, keyed_generator, training_generator
from engine.models.datasets.images import NUM_CLASSES, ImageData, split
from engine.models.datasets.text import NUM_BYTES, TokenData
from engine.models.layers import Batch

NUM_TOKENS = 100_000
NUM_IMAGES = 1000


class VectorData:
    """Normal vectors; their targets are a fixed linear map of them, with outputs of variance 1."""

    def __init__(self, seed: int, *, features: int = 32, outputs: int = 1):
        self.facts = DataFacts(task="regress", features=features, outputs=outputs)
        self.seed = seed
        self.teacher = torch.randn(features, outputs, generator=keyed_generator(seed, "teacher")) / features**0.5

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` new vectors."""
        return self._samples(size, training_generator(self.seed, step, pipeline, microbatch))

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` vectors that no training microbatch draws."""
        return self._samples(size, keyed_generator(self.seed, "validation", index))

    def _samples(self, size: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(size, self.facts.features, generator=generator)
        return Batch((inputs,), (inputs @ self.teacher,))


def synthetic_tokens(task: Task, seed: int, *, sequence: int = 32) -> TokenData:
    """Returns a text in which each byte is the previous one plus 1, 2, 3 or 4; its entropy is 1.39 nats per byte."""
    increments = torch.randint(1, 5, (NUM_TOKENS,), generator=keyed_generator(seed, "tokens"))
    content = (increments.cumsum(0) % NUM_BYTES).to(torch.uint8)
    return TokenData("synthetic", content, task, seed, sequence)


def synthetic_images(seed: int, *, channels: int = 3, size: int = 32) -> ImageData:
    """Returns images of a pattern of their class plus noise of the same variance."""
    generator = keyed_generator(seed, "images")
    labels = torch.randint(NUM_CLASSES, (NUM_IMAGES,), generator=generator)
    shape = (channels, size, size)
    patterns = torch.randint(128, (NUM_CLASSES, *shape), generator=generator, dtype=torch.uint8)
    noise = torch.randint(128, (NUM_IMAGES, *shape), generator=generator, dtype=torch.uint8)
    training, validation = split(patterns[labels] + noise, labels)
    return ImageData(training, validation, seed=seed, peak=255)

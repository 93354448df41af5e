"""Text as bytes: the documentation topics that ship with Python, or a user's file.

The first nine tenths are for training, the rest for validation. ``causal`` predicts the next byte; ``masked`` hides
15 % of the positions of each sample and predicts those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.models.data import DataFacts, Task, keyed_generator, training_generator
from engine.models.datasets.mapped_file import map_file
from engine.models.layers import Batch
from engine.models.losses import IGNORED

NUM_BYTES = 256
MASKED_PERCENT = 15


class TokenData:
    """Samples of `sequence` bytes, uint8 in `tokens`, from random places of one long text.

    The masked task adds one token to the 256, the last, which stands for a hidden position. Raises UserError naming
    `source` where the text is too short.
    """

    def __init__(self, source: str, tokens: Tensor, task: Task, seed: int, sequence: int):
        self.facts = DataFacts(task=task, vocabulary=NUM_BYTES + (task == "masked"), sequence=sequence)
        shortest = 10 * (sequence + 1)  # so that the last tenth has one sample and the byte after it
        if len(tokens) < shortest:
            expected = f"at least {shortest} bytes (10 x (sequence + 1))"
            raise UserError([Problem("data", expected, f"{len(tokens)} bytes in {source!r}")])
        num_training = len(tokens) * 9 // 10
        self.training_tokens, self.validation_tokens = tokens[:num_training], tokens[num_training:]
        self.seed = seed

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` samples of the training text."""
        generator = training_generator(self.seed, step, pipeline, microbatch)
        return self._samples(self.training_tokens, size, generator)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples of the validation text; they do not depend on the job's seed."""
        return self._samples(self.validation_tokens, size, keyed_generator(0, "validation", index))

    def _samples(self, tokens: Tensor, size: int, generator: torch.Generator) -> Batch:
        sequence = self.facts.sequence
        starts = torch.randint(len(tokens) - sequence, (size, 1), generator=generator)
        samples = tokens[starts + torch.arange(sequence + 1)].long()
        inputs, following = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        if self.facts.task == "causal":
            return Batch((inputs,), (following,))
        # Every sample hides the same number of positions, so that the mean over microbatches is that over samples.
        num_masked = max(1, sequence * MASKED_PERCENT // 100)
        positions = torch.rand(size, sequence, generator=generator).argsort(dim=1)[:, :num_masked]
        targets = torch.full_like(inputs, IGNORED).scatter(1, positions, inputs.gather(1, positions))
        return Batch((inputs.scatter(1, positions, self.facts.vocabulary - 1),), (targets,))


def text(task: Task, path: str, seed: int, *, sequence: int = 32) -> TokenData:
    """Opens the file at `path`, or Python's documentation topics if `path` is empty.

    Raises UserError if the file cannot be read or is too short.
    """
    content = map_file(path) if path else _python_topics()
    return TokenData(path or "text", content, task, seed, sequence)


def _python_topics() -> Tensor:
    from pydoc_data.topics import topics  # half a megabyte, imported only if used

    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)

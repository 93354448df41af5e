"""Token sequences of different lengths as microbatches: packed into full rows, or in buckets of about one length.

All are pure functions of their arguments, which a factory of a user's data calls. A sequence is a list or a tensor of
token IDs. Samples are pairs (inputs, targets) of int64 tensors, in which each target is the token behind its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.core.job.samples import permuted
from engine.core.random_key import random_key
from engine.models.layers import Batch
from engine.models.losses import IGNORED

Tokens = Sequence[int] | Tensor
Sample = tuple[Tensor, Tensor]


def next_tokens(sequence: Tokens) -> Sample:
    """Returns the sample of one sequence: all but its last token, and all but its first, each int64 [length - 1]."""
    tokens = torch.as_tensor(sequence, dtype=torch.int64, device="cpu")
    return tokens[:-1].clone(), tokens[1:].clone()


def packed(sequences: Iterable[Tokens], length: int, end: int) -> Iterator[Sample]:
    """Yields full rows of sequences with `end` behind each, int64 [length]; each token but the first is a target."""
    row: list[int] = []
    for sequence in sequences:
        row += [*map(int, sequence), end]
        while len(row) > length:
            yield next_tokens(row[: length + 1])
            row = row[length:]
    if len(row) > 1:
        inputs, targets = next_tokens([*row, *[end] * (length + 1 - len(row))])
        targets[len(row) - 1 :] = IGNORED
        yield inputs, targets


def padded(samples: Sequence[Sample], pad: int = 0) -> Batch:
    """Returns a microbatch [samples, longest]; the targets of the padding do not count."""
    inputs, targets = zip(*samples, strict=True)
    return Batch(
        (pad_sequence(list(inputs), batch_first=True, padding_value=pad),),
        (pad_sequence(list(targets), batch_first=True, padding_value=IGNORED),),
    )


def bucketed(
    sequences: Iterable[Tokens], tokens: int, *, window: int = 1024, seed: int = 0, pad: int = 0
) -> Iterator[Batch]:
    """Yields microbatches of sequences of about one length, with at most so many `tokens`, padding included.

    The sequences of a window are sorted by length, and its microbatches shuffled by the seed. Each sequence of two
    tokens or more comes once, and one that is longer than `tokens` alone.
    """
    coming = iter(sequences)
    for number, drawn in enumerate(iter(lambda: list(islice(coming, window)), [])):
        samples = sorted((next_tokens(each) for each in drawn if len(each) > 1), key=lambda sample: len(sample[0]))
        batches: list[list[Sample]] = []
        for sample in samples:
            if not batches or (len(batches[-1]) + 1) * len(sample[0]) > tokens:
                batches.append([])
            batches[-1].append(sample)
        key = random_key(seed, "buckets", number)
        yield from (padded(batches[permuted(place, len(batches), key)], pad) for place in range(len(batches)))

"""A file of token numbers, memory-mapped: every worker reads the pages that it needs, and no worker reads the file.

A file has unsigned numbers of two or four bytes, in the byte order of this machine, and nothing else (the form of
nanoGPT's prepared data). A sample has `sequence` tokens and the following ones as targets. Samples do not overlap; a
rest at the end is left out. The first nine tenths of the samples are for training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.models.data import DataFacts
from engine.models.datasets.mapped_file import map_file
from engine.models.indexed import Indexed, indexed

_TYPES = {2: torch.uint16, 4: torch.int32}  # the sign of four bytes is never set: no vocabulary is so large


class TokenWindows:
    """Samples first .. end - 1 of a file of tokens: (inputs, targets), each int64 [sequence]."""

    def __init__(self, tokens: Tensor, sequence: int, vocabulary: int, first: int, end: int, path: str):
        self._tokens, self._sequence, self._vocabulary, self._path = tokens, sequence, vocabulary, path
        self._first, self._end = first, end

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self._end - self._first

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns one sample; raises UserError for a token beyond the vocabulary."""
        start = (self._first + number) * self._sequence
        window = self._tokens[start : start + self._sequence + 1].long()
        largest = int(window.max())
        if largest >= self._vocabulary or int(window.min()) < 0:
            expected = f"tokens below data_args.vocabulary {self._vocabulary}"
            raise UserError([Problem("data", expected, f"{largest} behind token {start} of {self._path!r}")])
        return window[:-1], window[1:]


def tokens(path: str, seed: int, *, vocabulary: int = 50257, sequence: int = 32, token_bytes: int = 2) -> Indexed:
    """Maps the file of tokens at `path`; raises UserError if it cannot be mapped, or is too short."""
    if token_bytes not in _TYPES:
        raise UserError([Problem("data_args.token_bytes", "2 or 4", repr(token_bytes))])
    content = map_file(path)
    if len(content) % token_bytes:
        expected = f"a file of whole tokens (data_args.token_bytes {token_bytes})"
        raise UserError([Problem("data", expected, f"{len(content)} bytes in {path!r}")])
    mapped = content.view(_TYPES[token_bytes])
    num_windows = (len(mapped) - 1) // sequence
    if num_windows < 2:
        expected = f"at least {2 * sequence + 1} tokens (2 x sequence + 1)"
        raise UserError([Problem("data", expected, f"{len(mapped)} tokens in {path!r}")])
    num_training = max(1, num_windows * 9 // 10)
    training = TokenWindows(mapped, sequence, vocabulary, 0, num_training, path)
    validation = TokenWindows(mapped, sequence, vocabulary, num_training, num_windows, path)
    facts = DataFacts(task="causal", vocabulary=vocabulary, sequence=sequence)
    return indexed(training, validation, facts, seed=seed)

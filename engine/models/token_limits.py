"""The limits of columns of tokens: the rows of the tables that a model of transformers reads with them.

A table that is read behind its end says "index out of range in self" on a CPU, and makes a GPU unusable for the
process. So rows are checked when they are loaded, and those of a data set by number before the first step, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.models.data import Data

_IGNORED = -100  # a label that the loss leaves out
_POSITIONS = frozenset({"wpe", "position_embeddings", "position_embedding", "embed_positions", "positions_embed"})
_PATIENCE_S = 1.0  # for all rows of a data set; those behind are checked when they are loaded


class TokenLimit(NamedTuple):
    """The limits of a column: its numbers are below `ids`, its rows no longer than `length`; 0 is no limit."""

    ids: int = 0
    length: int = 0


TokenLimits = Mapping[str, TokenLimit]  # by column


def token_limits(module: nn.Module) -> TokenLimits:
    """Returns the limits that the tables of a model of transformers have; none for another module."""
    read, write = _part(module, "get_input_embeddings"), _part(module, "get_output_embeddings")
    if read is None:  # a model of texts and images
        read = _part(getattr(module, "text_model", None), "get_input_embeddings")
    if not isinstance(read, nn.Embedding):
        return {}
    has_decoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    lengths = {True: 0, False: 0}  # of the decoder beside an encoder, and of all others
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS and "vision" not in name:
            of_decoder = has_decoder and "decoder" in name
            lengths[of_decoder] = min(lengths[of_decoder] or table.num_embeddings, _rows(table))
    targets = write.out_features if isinstance(write, nn.Linear) else 0
    of_labels = TokenLimit(targets, lengths[True] if has_decoder else 0)
    ids = {"input_ids": TokenLimit(read.num_embeddings, lengths[False])}
    return {**ids, "decoder_input_ids": TokenLimit(read.num_embeddings, lengths[True]), "labels": of_labels}


def _part(module: object, name: str) -> Any:
    try:
        return getattr(module, name)()
    except (AttributeError, NotImplementedError):  # no model of transformers, or one without such a table
        return None


def _rows(table: nn.Embedding) -> int:
    """Returns the number of positions: some models begin behind the padding, others at an offset."""
    first = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - first - int(getattr(table, "offset", 0))


def row_problem(columns: Mapping[str, Any], limits: TokenLimits, where: str, hint: str = "") -> Problem | None:
    """Returns the first problem of a row, or of rows along dimension 0, with the limits; `where` names it."""
    for name, (most_ids, most) in limits.items():
        tensor = columns.get(name)
        if tensor is None or (tensor := torch.as_tensor(tensor, device="cpu")).is_floating_point() or not tensor.dim():
            continue
        if most and (length := tensor.shape[-1]) > most:
            expected = f"rows of at most {most} tokens, the positions of the model"
            way = hint or f"tokenizer(..., truncation=True, max_length={most})"
            return Problem("data", expected, f"{length} in {where}, column {name}", way)
        wrong = (tensor < 0) | (tensor >= most_ids)
        if name == "labels":
            wrong &= tensor != _IGNORED
        if most_ids and bool(wrong.any()):
            at = where if tensor.dim() == 1 else f"row {_first_row(wrong)} of {where}"
            expected = f"token ids below {most_ids}, the vocabulary of the model"
            place = f"{int(tensor[wrong][0])} in {at}, column {name}"
            return Problem("data", expected, place, "read the texts with its own tokenizer")
    return None


def _first_row(wrong: Tensor) -> int:
    return int(wrong.flatten(1).any(dim=1).nonzero()[0])


def limit_rows(data: Data, limits: TokenLimits) -> None:
    """Lets a source of data refuse rows beyond the limits from now on; raises UserError for those that it has."""
    if limit := getattr(data, "limit_rows", None):
        limit(limits)
        return
    most, facts = limits.get("input_ids", TokenLimit()), data.facts
    sizes = {"vocabulary": (facts.vocabulary, most.ids), "sequence": (facts.sequence, most.length)}
    if problems := [
        Problem(f"data_args.{name}", f"at most {limit}, as the model has", str(size))
        for name, (size, limit) in sizes.items()
        if limit and size > limit
    ]:
        raise UserError(problems)


def set_problem(sets: Mapping[str, Any], limits: TokenLimits, hint: str = "") -> Problem | None:
    """Returns the first problem of the rows of data sets by name, as far as they are read in a second."""
    until_s = time.monotonic() + _PATIENCE_S
    problems = (row_problem(row, limits, where, hint) for where, row in _rows_of(sets) if isinstance(row, Mapping))
    return next((each for each in problems if each is not None or time.monotonic() > until_s), None)


def _rows_of(sets: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, samples in sets.items():
        for number in range(len(samples)):
            yield f"row {number} of the {name} set", samples[number]

"""Transformers over tokens: `gpt` predicts the next token from the past, `bert` predicts hidden tokens from all others.

Layers: the embedding, `depth` pre-norm blocks, the head. Attention is matrix products and a softmax. With `fused` it is
one of torch's kernels, which torch chooses by shape and dtype among those that a deterministic job leaves on. Dropout
inside of attention has another kernel, so big models have none.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model, Tensors, Tie
from engine.models.losses import default_loss

WEIGHT_STD = 0.02


def gpt(
    facts: DataFacts,
    *,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.1,
    tied: bool = False,
    fused: bool = False,
) -> Model:
    """Returns a decoder; with `tied`, the head uses the embedding's weight; with `fused`, attention is one kernel."""
    return _transformer(facts, width, depth, heads, dropout, is_causal=True, tied=tied, is_fused=fused)


def bert(
    facts: DataFacts, *, width: int = 128, depth: int = 4, heads: int = 4, dropout: float = 0.1, tied: bool = False
) -> Model:
    """Returns an encoder; with `tied`, the head uses the weight of the embedding."""
    return _transformer(facts, width, depth, heads, dropout, is_causal=False, tied=tied)


def _transformer(
    facts: DataFacts,
    width: int,
    depth: int,
    heads: int,
    dropout: float,
    *,
    is_causal: bool,
    tied: bool,
    is_fused: bool = False,
) -> Model:
    block = partial(
        CausalBlock if is_causal else Block, width, heads, depth, facts.sequence, dropout, is_causal, is_fused
    )
    layers = (
        LayerSpec("embedding", "Embedding", partial(Embedding, facts.vocabulary, facts.sequence, width, dropout)),
        *(LayerSpec(f"block{index}", "Block", block) for index in range(depth)),
        LayerSpec("head", "Head", partial(Head, width, facts.vocabulary)),
    )
    ties = (Tie(((0, "token.weight"), (depth + 1, "logits.weight"))),) if tied else ()
    return Model(layers, default_loss, ties)


def _linear(num_inputs: int, num_outputs: int, std: float = WEIGHT_STD, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs, bias=bias)
    nn.init.normal_(linear.weight, std=std)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class Embedding(nn.Module):
    """Tokens, int64 [size, sequence], to vectors [size, sequence, width]: token plus learned position."""

    def __init__(self, vocabulary: int, sequence: int, width: int, dropout: float):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(sequence, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=WEIGHT_STD)
        nn.init.normal_(self.position, std=WEIGHT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds the tokens."""
        return self.dropout(self.token(tokens) + self.position)

    def forward_slice(self, tokens: Tensor, start: int, state: Tensors) -> tuple[Tensor, Tensors]:
        """Embeds the tokens of a slice."""
        return self.dropout(self.token(tokens) + self.position[start : start + tokens.shape[1]]), ()


class Block(nn.Module):
    """Self-attention and a feed-forward of four times the width, each with a residual connection."""

    hidden: Tensor | None

    def __init__(
        self, width: int, heads: int, depth: int, sequence: int, dropout: float, is_causal: bool, is_fused: bool
    ):
        super().__init__()
        # Scaled so that the variance of the sum of 2 x depth residual branches does not grow with depth.
        residual_std = WEIGHT_STD / math.sqrt(2 * depth)
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = _linear(width, 3 * width)
        self.attention_out = _linear(width, width, residual_std)
        self.norm_feedforward = nn.LayerNorm(width)
        self.feedforward_in = _linear(width, 4 * width)
        self.feedforward_out = _linear(4 * width, width, residual_std)
        self.dropout = nn.Dropout(dropout)
        self.is_fused = is_fused
        hidden = torch.ones(sequence, sequence, dtype=torch.bool).triu(1) if is_causal and not is_fused else None
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [size, sequence, width] to the same shape."""
        return self._slice(x, ())[0]

    def _slice(self, x: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        attended, state = self._attend(self.norm_attention(x), state)
        x = x + self.dropout(self.attention_out(attended))
        feedforward = nn.functional.gelu(self.feedforward_in(self.norm_feedforward(x)))
        return x + self.dropout(self.feedforward_out(feedforward)), state

    def _attend(self, x: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Returns what the positions of `x` attend to, and the keys and values up to them; `state` has earlier ones."""
        size, sequence, width = x.shape
        per_head = self.query_key_value(x).view(size, sequence, 3 * self.heads, width // self.heads).transpose(1, 2)
        query, key, value = per_head.chunk(3, dim=1)
        start = state[0].shape[2] if state else 0
        if state:
            key, value = (torch.cat(pair, dim=2) for pair in zip(state, (key, value), strict=True))
        if self.is_fused:
            share = self.dropout.p if self.training else 0.0
            mask = x.new_ones(sequence, key.shape[2], dtype=torch.bool).tril(start) if state else None
            attend = partial(nn.functional.scaled_dot_product_attention, dropout_p=share, is_causal=not state)
            return attend(query, key, value, mask).transpose(1, 2).reshape(size, sequence, width), (key, value)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden[start : start + sequence, : start + sequence], -math.inf)
        mixed = self.dropout(scores.softmax(dim=-1)) @ value
        return mixed.transpose(1, 2).reshape(size, sequence, width), (key, value)


class CausalBlock(Block):
    """A block that can take a sequence in slices: no position attends to a later one."""

    def forward_slice(self, x: Tensor, start: int, state: Tensors) -> tuple[Tensor, Tensors]:
        """Maps a slice; `state` has the keys and values of earlier slices, [size, heads, start, width / heads]."""
        return self._slice(x, state)


class Head(nn.Module):
    """Vectors [size, sequence, width] to logits [size, sequence, vocabulary]."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = _linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of every position."""
        return self.logits(self.norm(x))

    def forward_slice(self, x: Tensor, start: int, state: Tensors) -> tuple[Tensor, Tensors]:
        """Returns the logits of a slice."""
        return self(x), ()

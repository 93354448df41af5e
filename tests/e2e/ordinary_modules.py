"""Modules as other programs have them: a GPT in the style of HuggingFace, a ResNet, an encoder with a decoder."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Output:
    """The result of a language model."""

    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            each.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(self.ln_1(x)).split(width, dim=2)
        )
        scores = (query @ key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(~mask[:time, :time], float("-inf"))
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, time, width)
        x = x + self.proj(mixed)
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, sequence: int, dropout: float):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(sequence, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(width, heads=2) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).tril(), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x = block(x, self.mask)
        return self.ln_f(x)


class LanguageModel(nn.Module):
    """Returns the loss if it is called with labels; its head is tied to its embedding."""

    def __init__(self, depth: int, dropout: float):
        super().__init__()
        self.transformer = Decoder(vocabulary=256, width=16, depth=depth, sequence=32, dropout=dropout)
        self.lm_head = nn.Linear(16, 256, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        logits = self.lm_head(self.transformer(input_ids))
        if attention_mask is not None:
            logits = logits * attention_mask[..., None]
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits)


def language_model(*, depth: int = 4, dropout: float = 0.0) -> LanguageModel:
    return LanguageModel(depth, dropout)


class SharedEmbedding(nn.Module):
    """Reads one parameter at its begin and at its end, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.linear(hidden, self.embedding.weight)


def shared_embedding() -> SharedEmbedding:
    return SharedEmbedding()


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Torchvision's resnet18, statement for statement, with a width and one input channel."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Residual(4 * width, 8 * width, 2), Residual(8 * width, 8 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(*, width: int = 8) -> ResNet:
    return ResNet(width)


class EncoderDecoder(nn.Module):
    """Each level of the decoder reads the output of the same level of the encoder; all of them read the input."""

    calls: Tensor

    def __init__(self, levels: int):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(32, 32) for _ in range(levels))
        self.decoder = nn.ModuleList(nn.Linear(32, 32) for _ in range(levels))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale = torch.tensor(0.5)  # a constant, which is neither parameter nor buffer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.calls = self.calls + 1
        hidden, skips = x, list[Tensor]()
        for layer in self.encoder:
            hidden = layer(hidden).tanh()
            skips.append(hidden)
        for layer in self.decoder:
            hidden = torch.cat([layer(hidden + skips.pop()), x[:, :1]], dim=1)[:, 1:] * self.scale
        return OrderedDict(out=hidden.sum(dim=1, keepdim=True), inner=skips[0] if skips else hidden)


def encoder_decoder(*, levels: int = 4) -> EncoderDecoder:
    return EncoderDecoder(levels)


def perceptron() -> nn.Module:
    """Returns a model for vectors of 32 features."""
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

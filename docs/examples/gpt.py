"""A GPT as one writes it: an ordinary module whose head is tied to its embedding. Nothing here knows of bamboo."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention over the bytes so far, and a small network for each byte."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor with the shape of `x`, [batch, length, width]."""
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        query, key, value = (each.view(heads).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of bytes; called with labels, the byte after each position, it also returns the loss."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, length: int = 64):
        super().__init__()
        self.length = length
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for each in (self.tokens, self.places):
            nn.init.normal_(each.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Returns logits [batch, length, 256], and with labels [batch, length] the mean loss."""
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> str:
        """Returns the prompt and the `count` most likely bytes behind it, one after the other."""
        text = list(prompt.encode())
        for _ in range(count):
            logits = self(torch.tensor([text[-self.length :]]))["logits"]
            text.append(int(logits[0, -1].argmax()))
        return bytes(text).decode(errors="replace")

"""The peer of a start with --hf: a script as one writes it with transformers alone, from the imports to its first step.

python -m engine.bench.transformers_peer make FOLDER WIDTH     writes a GPT-2 with random weights, and a text
python -m engine.bench.transformers_peer train FOLDER ROWS     prints when its first step has ended
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

LENGTH = 128  # tokens of a row
TEXT = "text.txt"  # in the folder of the model
_WIDTH_OF_HEAD = 64


def make(folder: Path, width: int) -> None:
    """Writes a model of twelve layers, its tokenizer, whose tokens are bytes, and a text of 64 rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_embd=width, n_head=max(1, width // _WIDTH_OF_HEAD), **ends)
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / TEXT).write_text("To be, or not to be, that is the question.\n" * (64 * LENGTH // 42), encoding="utf-8")


def train(folder: Path, num_rows: int) -> None:
    """Trains the first step with so many rows; prints the time of its end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # as each worker
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)((folder / TEXT).read_text())["input_ids"])
    rows = tokens[: num_rows * LENGTH].view(num_rows, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=rows, attention_mask=torch.ones_like(rows), labels=rows).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"ended_ns={time.monotonic_ns()}")


if __name__ == "__main__":
    {"make": make, "train": train}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))

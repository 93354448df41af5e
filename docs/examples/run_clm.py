"""Trains a small GPT-2 on the bytes of a text with the Trainer of transformers; bamboo is in the line with its name.

python run_clm.py --text sonnets.txt --output_dir out --stages 2
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, default_data_collator, set_seed

from bamboo.hf import Trainer, TrainingArguments


@dataclass
class DataArguments:
    """The data of the script."""

    text: str = field(metadata={"help": "A text file."})
    block_size: int = field(default=64, metadata={"help": "Bytes of a row."})


def accuracy(prediction):
    """Returns the fraction of the next bytes that have the largest output."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean())}


def main(words=None, callbacks=()):
    """Trains, evaluates, and returns the Trainer."""
    data, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses(words)
    set_seed(args.seed)
    blocks = torch.tensor([*Path(data.text).read_bytes()]).split(data.block_size)
    rows = [{"input_ids": ids, "labels": ids} for ids in blocks if len(ids) == data.block_size]
    held_out = len(rows) // 10
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": data.block_size, "bos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0}
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **dropout)),
        args=args,
        train_dataset=rows[:-held_out],
        eval_dataset=rows[-held_out:],
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        callbacks=[*callbacks],
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())
    return trainer


if __name__ == "__main__":
    main()

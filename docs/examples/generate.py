"""Loads exported weights in plain torch, and lets them write. Nothing of bamboo is imported."""

import sys

import torch
from gpt import GPT


def main(path: str, prompt: str = "Shall I", count: int = 200) -> None:
    """Prints the text that a GPT with the weights in `path` (a file of torch) writes behind a prompt."""
    model = GPT()
    model.load_state_dict(torch.load(path, weights_only=True))
    print(model.eval().generate(prompt, count))


if __name__ == "__main__":
    main(*sys.argv[1:3])

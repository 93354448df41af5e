"""Models of transformers by ID or folder, for jobs: ``bamboo run --hf gpt2``.

`pretrained` is the factory of such a job's model; its loader is that of transformers, which is loaded by the first
call. `text` is a source of data: a text file in rows of tokens, with the labels that transformers expects.

Rule: code that comes with a model is never run, nor asked about, and weights are read from safetensors files only: the
older files are pickles.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.core.errors import Problem, UserError
from engine.models.data import DataSets, indexed

_INSTALL = "pip install 'bamboo-train[hf]'"
_NO_CODE = {"trust_remote_code": False}
_DEFAULT = "AutoModelForCausalLM"  # of a config that names no class
_BESIDE = (
    "*token*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*processor_config.json",
    "chat_template*",
    "generation_config*",
)


def pretrained(*, path: str = "", random: bool = False, architecture: str = "", attention: str = "") -> nn.Module:
    """Returns the model of an ID or a folder, in float32 and without a cache.

    With `random` its weights are drawn from torch's default generator, and only its config is read. `architecture` is a
    class of transformers, by default the one that the config names; `attention` is its kind: eager, sdpa. Raises
    UserError if transformers is missing or the model cannot be loaded.
    """
    transformers = _transformers()
    with _loading(path):
        config = transformers.AutoConfig.from_pretrained(path, **_NO_CODE)
        name = architecture or next(iter(getattr(config, "architectures", None) or ()), _DEFAULT)
        kind = getattr(transformers, name, None)
        if kind is None:
            problem = Problem("model_args.architecture", "a class of transformers", repr(name))
            raise UserError([problem])
        _without_cache(config)
        options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
        is_auto = name.startswith("Auto")
        options |= _NO_CODE if is_auto else {}
        if random:
            make = kind.from_config if is_auto else kind._from_config
            model: nn.Module = make(config, dtype=torch.float32, **options)
        else:
            model = kind.from_pretrained(path, config=config, dtype=torch.float32, use_safetensors=True, **options)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # A tensor in a mapped file lies anywhere, and its place in memory can decide bits.
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model.train()


def text(*, file: str = "", length: int = 128, tokenizer: str = "") -> DataSets:
    """Returns a text file as rows of tokens: int64 [length] input_ids, attention_mask and labels, which are the same.

    A tenth of the rows, the last ones, are for validation. Raises UserError if it has too few tokens, or without
    transformers.
    """
    transformers = _transformers()
    with _loading(tokenizer):
        encode = transformers.AutoTokenizer.from_pretrained(tokenizer, **_NO_CODE)
    tokens = torch.tensor(encode(Path(file).read_text(encoding="utf-8"))["input_ids"], device="cpu")
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in tokens.split(length)]
    rows = [row for row in rows if len(row["labels"]) == length]
    held_out = max(1, len(rows) // 10)
    if len(rows) < 2:
        raise UserError([Problem("data_args.file", f"a text of {2 * length} tokens or more", f"{len(tokens)} tokens")])
    return indexed(rows[:-held_out], rows[-held_out:])


def save_config(model_args: Mapping[str, Any], folder: Path) -> None:
    """Writes what ``from_pretrained`` needs beside the weights of a model with these arguments of `pretrained`.

    That is the config, and the tokenizer if its files are local. Raises UserError if transformers is missing or the
    config cannot be loaded.
    """
    path, architecture = str(model_args.get("path", "")), model_args.get("architecture")
    transformers = _transformers()
    with _loading(path):
        config = transformers.AutoConfig.from_pretrained(path, **_NO_CODE)
        if architecture and not str(architecture).startswith("Auto"):
            config.architectures = [architecture]
        config.save_pretrained(folder)
    for pattern in _BESIDE if os.path.isdir(path) else ():
        for file in Path(path).glob(pattern):
            if not file.name.endswith((".safetensors", ".bin")):
                shutil.copyfile(file, folder / file.name)


def _without_cache(config: Any) -> None:
    """Turns off the cache of a config and of the configs in it: a training has no use for it."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "use_cache"))]
    for part in (part for part in parts if hasattr(part, "use_cache")):
        part.use_cache = False


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise UserError([Problem("--hf", "the package transformers", f"{error}", _INSTALL)]) from error
    transformers.utils.logging.disable_progress_bar()  # the log of a worker is a file
    return transformers


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    """Turns what the loader of transformers says about a wrong path into the user's mistake."""
    try:
        yield
    except (OSError, ValueError) as error:
        expected = "an ID or a folder that transformers can load"
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise UserError([Problem("--hf", expected, repr(path), reason)]) from error

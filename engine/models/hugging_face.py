"""Models of transformers by ID or folder, for jobs: ``bamboo run --hf gpt2``.

`pretrained` is the factory of such a job's model; its loader is that of transformers, which is loaded by the first
call. `text` and `dataset` are sources of data: a text file in rows of tokens with the labels that transformers expects,
and a data set of the package datasets.

Rule: code that comes with a model is never run, nor asked about, and weights are read from safetensors files only: the
older files are pickles.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.core.errors import Problem, UserError
from engine.models.data import ONLY, DataSets, indexed
from engine.models.data_sources import TARGETS

_INSTALL = "pip install 'bamboo-train[hf]'"
_NO_SCRIPTS = 4  # the first version of datasets that runs no code of a data set
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


def pretrained(
    *, path: str = "", random: bool = False, architecture: str = "", attention: str = "", loss_factor: int = 1
) -> nn.Module:
    """Returns the model of an ID or a folder, in float32 and without a cache.

    With `random` its weights are drawn from torch's default generator, and only its config is read. `architecture` is a
    class of transformers, by default the one that the config names; `attention` is its kind: eager, sdpa. Its loss is
    multiplied by `loss_factor`. Raises UserError if transformers is missing or the model cannot be loaded.
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
    if loss_factor != 1:
        model_class = type(model)  # a method of the class, because the module is copied
        model.__class__ = type(
            model_class.__name__, (model_class,), {"forward": _scaled(model_class.forward, loss_factor)}
        )
    return model.train()


def _scaled(forward: Callable[..., Any], factor: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def scaled(*inputs: Any, **columns: Any) -> Any:
        outputs = forward(*inputs, **columns)
        if outputs.get("loss") is not None:  # there is none without labels
            outputs["loss"] = outputs["loss"] * factor
        return outputs

    return scaled


def text(*, file: str = "", length: int = 128, tokenizer: str = "") -> DataSets:
    """Returns a text file as rows of tokens: int64 [length] input_ids, attention_mask and labels, which are the same.

    A tenth of the rows, the last ones, are for validation. Raises UserError if it has too few tokens, or without
    transformers.
    """
    tokens = torch.tensor(_tokenizer(tokenizer)(Path(file).read_text(encoding="utf-8"))["input_ids"], device="cpu")
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in tokens.split(length)]
    rows = [row for row in rows if len(row["labels"]) == length]
    held_out = max(1, len(rows) // 10)
    if len(rows) < 2:
        raise UserError([Problem("data_args.file", f"a text of {2 * length} tokens or more", f"{len(tokens)} tokens")])
    return indexed(rows[:-held_out], rows[-held_out:])


def dataset(*, name: str = "", config: str = "", length: int = 128, tokenizer: str = "") -> dict[str, Any]:
    """Returns the sets of the package datasets, by name: a folder of ``save_to_disk``, or what ``load_dataset`` takes.

    Columns of tokens stay as they are. Without `input_ids`, the tokenizer reads the column `text` once, for all workers
    and runs. Beside a column of targets, a row is one text, cut or padded to `length` tokens; else `length` tokens
    of the joined texts, which are the labels, too. The last tenth of a single set is for validation. Raises UserError
    if it cannot be loaded, or without datasets or transformers.
    """
    package = _package("datasets", "--data", "pip install datasets")
    if int(package.__version__.split(".")[0]) < _NO_SCRIPTS:
        raise UserError([Problem("--data", f"the package datasets {_NO_SCRIPTS} or newer", package.__version__)])
    package.disable_progress_bars()
    is_saved = any(os.path.exists(os.path.join(name, each)) for each in ("state.json", "dataset_dict.json"))
    with _loading(name, "--data", "a folder or a name that datasets can load"):
        loaded = package.load_from_disk(name) if is_saved else package.load_dataset(name, config or None)
    sets = {str(split): each for split, each in loaded.items()} if isinstance(loaded, Mapping) else {"train": loaded}
    rows = {split: _rows(each, length, tokenizer, package) for split, each in sets.items()}
    if list(rows) != ["train"]:
        return rows
    (only,), held_out = rows.values(), max(1, len(rows["train"]) // 10)
    if len(only) < 2:
        raise UserError([Problem("data", "a data set of two rows or more", f"{len(only)} in {name!r}")])
    first = len(only) - held_out
    return {"train": only.select(range(first)), ONLY: only.select(range(first, len(only)))}


def _rows(samples: Any, length: int, tokenizer: str, package: Any) -> Any:
    """Returns a set whose column of texts is read by the tokenizer, and kept in the cache of datasets."""
    target = next((each for each in TARGETS if each in samples.column_names), None)
    if "input_ids" in samples.column_names or "text" not in samples.column_names:
        return samples
    encode = _tokenizer(tokenizer)
    if target and encode.pad_token is None:
        raise UserError([Problem("data_args.tokenizer", "a tokenizer with a padding token", repr(tokenizer))])

    def read(texts: dict[str, list[Any]]) -> dict[str, Any]:
        if target:
            return dict(encode(texts["text"], truncation=True, max_length=length, padding="max_length"))
        tokens = [token for ids in encode(texts["text"])["input_ids"] for token in ids]
        ids = [tokens[end - length : end] for end in range(length, len(tokens) + 1, length)]
        return {"input_ids": ids, "attention_mask": [[1] * length for _ in ids], "labels": ids}

    reader = getattr(encode, "backend_tokenizer", None)
    vocabulary = reader.to_str() if reader is not None else repr(sorted(encode.get_vocab().items()))
    parts = (samples._fingerprint, length, target, repr(encode), vocabulary)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    place = Path(package.config.HF_DATASETS_CACHE) / "bamboo" / f"{key}.arrow"
    place.parent.mkdir(parents=True, exist_ok=True)
    others = [each for each in samples.column_names if each != target]
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the other workers wait for the first one
        options = {"remove_columns": others, "cache_file_name": str(place), "new_fingerprint": key}
        return samples.map(read, batched=True, load_from_cache_file=True, **options)
    finally:
        os.close(folder)


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


def _tokenizer(path: str) -> Any:
    transformers = _transformers()
    with _loading(path):
        return transformers.AutoTokenizer.from_pretrained(path, **_NO_CODE)


def _transformers() -> Any:
    transformers = _package("transformers", "--hf", _INSTALL)
    transformers.utils.logging.disable_progress_bar()  # the log of a worker is a file
    return transformers


def _package(name: str, flag: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError([Problem(flag, f"the package {name}", f"{error}", install)]) from error


@contextlib.contextmanager
def _loading(
    path: str, flag: str = "--hf", expected: str = "an ID or a folder that transformers can load"
) -> Iterator[None]:
    """Turns what a loader says about a wrong path into the user's mistake."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise UserError([Problem(flag, expected, repr(path), reason)]) from error

"""Draws models of transformers and counts those that bamboo splits into three stages or more.

    python -m tests.e2e.hf_draw [--models 30] [--seed 0] [--goal 0.8] [CONFIG ...]

The classes come from the tables of transformers for five tasks; each config is made small, with random weights. A model
that cannot be made small or does not run in plain torch is no model of the draw. For the others a line has the number
of layers, or the reason why there are fewer than three, which names a line of code. A model that is split must give the
losses of the whole module, bit for bit, in microbatches with padding and without.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.job.job import Job
from engine.models.data import DataSets, indexed
from engine.models.data_sources import open_data
from engine.models.layers import as_tensors
from engine.models.model_loader import build_model
from engine.runtime.stage.stage import build_layer
from tests.e2e.hf_zoo import VOCABULARY, tokens

_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "tokens",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "tokens",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "pairs",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "class",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
}
_SMALL: dict[str, Any] = {  # argument of a config -> value
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "image_size": 16,
    "patch_size": 4,
    "state_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": 3,
}
_LIMIT_S = 40
_MOST_PARAMETERS = 3_000_000
_made: dict[str, Any] = {}  # the module and the rows of the model at hand, which a job names


class DrawnModel(NamedTuple):
    """A class of models, its class of configs, and the kind of rows that it takes."""

    model: str
    config: Any
    rows: str


class NotDrawnError(Exception):
    """A model that cannot be made small, or does not run in plain torch."""


def candidates() -> list[DrawnModel]:
    """Returns every model of the tables, sorted by name."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    for table, kind in _TASKS.items():
        for name, classes in getattr(modeling_auto, table).items():
            for model in (classes,) if isinstance(classes, str) else classes:
                with contextlib.suppress(Exception):
                    found.append(DrawnModel(model, CONFIG_MAPPING[name], kind))
    return sorted(found, key=lambda drawn: (drawn.model, drawn.rows))


def small(config: Any) -> Any:
    """Returns a small config of a class, without dropout and without a cache."""
    given = {name: value for name, value in _SMALL.items() if name in _arguments(config)}
    for attempt in (given, {key: value for key, value in given.items() if key != "head_dim"}):
        try:
            made = config(**attempt)
            break
        except Exception as error:
            problem = error
    else:
        raise NotDrawnError(f"config: {problem}")
    for name, value in vars(made).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):  # draws are seeded otherwise
            setattr(made, name, 0.0)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


def _arguments(config: Any) -> set[str]:
    named = set(inspect.signature(config.__init__).parameters)
    annotated = {name for kind in config.__mro__ for name in vars(kind).get("__annotations__", {})}
    return named | annotated | {"num_labels", "pad_token_id", "bos_token_id", "eos_token_id"}


def rows(kind: str, config: Any) -> list[dict[str, Any]]:
    """Returns 24 rows, of which a part is padded."""
    generator = torch.Generator().manual_seed(3)
    made: list[dict[str, Any]] = []
    for number in range(24):
        row: dict[str, Any] = dict(tokens(generator))
        labels = torch.where(row["attention_mask"] == 1, row["input_ids"], -100)
        if kind == "image":
            size, channels = getattr(config, "image_size", 16), getattr(config, "num_channels", 3)
            height, width = (size, size) if isinstance(size, int) else size
            row = {"pixel_values": torch.randn(channels, height, width, generator=generator), "labels": number % 3}
        elif kind == "class":
            row["labels"] = number % 3
        elif kind == "pairs":
            row |= {"decoder_input_ids": row["input_ids"].flip(0).clone(), "labels": labels}
        else:
            row["labels"] = labels
        made.append(row)
    return made


def module() -> nn.Module:
    """Returns the module at hand: the factory of the jobs here."""
    model: nn.Module = _made["module"]
    return model


def source() -> DataSets:
    """Returns the rows at hand."""
    return indexed(_made["rows"])


def outcome(drawn: DrawnModel) -> tuple[bool, str]:
    """Returns whether a model is split into three layers or more, and a text; raises NotDrawnError."""
    import transformers

    config = small(drawn.config)
    torch.manual_seed(0)
    kind = getattr(transformers, drawn.model)
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in kind(config).parameters())
        if size > _MOST_PARAMETERS:
            raise NotDrawnError(f"{size:,} parameters")
        model = kind(config).float()
        columns = rows(drawn.rows, config)
        batches = [_batch(columns, first) for first in range(0, 12, 2)]
        _made.update(module=model, rows=columns)
        with torch.no_grad():
            loss = model(**batches[0]).loss
        if loss is None or not bool(torch.isfinite(loss)):
            raise NotDrawnError("no finite loss")
    except NotDrawnError:
        raise
    except Exception as error:
        raise NotDrawnError(f"{type(error).__name__}: {error}") from error
    job = Job(model=f"{__name__}:module", data=f"{__name__}:source", microbatch_size=2, steps=3)
    data = open_data(job)
    try:
        made = build_model(job, data.facts, data)
    except UserError as error:
        return False, f"refused: {error.problems[0]}"
    except Exception as error:
        return False, f"fails: {type(error).__name__}: {error}"
    if len(made.layers) < 3:
        return False, f"{len(made.layers)} layers: {'; '.join(made.notes) or 'no reason'}"
    different = _different(job, made, model, data, batches)
    return not different, different or f"{len(made.layers)} layers"


def _batch(columns: list[dict[str, Any]], first: int) -> dict[str, Tensor]:
    part = columns[first : first + 2]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in part]) for name in part[0]}


def _different(job: Job, made: Any, model: nn.Module, data: Any, batches: list[dict[str, Tensor]]) -> str:
    layers = [build_layer(job, made, index).train() for index in range(len(made.layers))]
    model.train()
    names = data.facts.form.names
    for number, batch in enumerate(batches):
        values: tuple[Tensor, ...] = tuple(batch[name].clone() for name in names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected = model(**{name: each.clone() for name, each in batch.items()}).loss
        try:
            for layer in layers:
                values = as_tensors(layer(*values), "a layer")
            loss = made.loss(values, (batch["labels"],))
        except Exception as error:
            return f"microbatch {number}: {type(error).__name__}: {error}"
        if not torch.equal(loss, expected):
            return f"microbatch {number}: loss {loss.item()!r}, expected {expected.item()!r}"
    return ""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {_LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def main(say: Callable[[str], object] = lambda text: print(text, flush=True)) -> int:
    """Prints a line for each model, and the share; returns 1 if it is below the goal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, default=0.8)
    parser.add_argument("only", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    everything = candidates()
    order = random.Random(options.seed).sample(everything, len(everything))  # noqa: S311
    if options.only:
        order = [drawn for drawn in order if drawn.model in options.only]
    split = drawn_models = skipped = 0
    for drawn in order:
        if drawn_models == options.models:
            break
        try:
            with _limited():
                is_split, text = outcome(drawn)
        except (NotDrawnError, TimeoutError) as error:
            skipped += 1
            say(f"    not drawn  {drawn.model}: {str(error)[:150]!r}")
            continue
        drawn_models += 1
        split += is_split
        say(f"{'split' if is_split else 'WHOLE':<15}{drawn.model}: {text}")
    say(f"{split} of {drawn_models} are split ({skipped} do not run in plain torch)")
    return int(split < options.goal * drawn_models)


if __name__ == "__main__":
    # As a module of this name, because a job imports its factories.
    from tests.e2e import hf_draw

    sys.exit(hf_draw.main())

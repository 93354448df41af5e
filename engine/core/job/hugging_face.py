"""The fields of a job that trains a model of transformers: ``bamboo run --hf ID`` stands for them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.errors import Problem, UserError
from engine.core.job.job import FACTORY
from engine.core.units import Scalar

MODEL = "engine.models.hugging_face:pretrained"
TEXT = "engine.models.hugging_face:text"
DATASET = "engine.models.hugging_face:dataset"
# What the loader imports for any model, most of the time of a start.
IMPORTS = (
    *("transformers.modeling_layers", "transformers.generation.utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)
BUILT_IN = ("auto", "digits", "synthetic", "text")  # data that keep their names beside such a model


def hugging_face_fields(
    path: str, is_random: bool, values: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, Scalar]]:
    """Returns fields as texts, and arguments by dotted name, of a job with the model of an ID or a folder.

    The data that `values` name are read with the tokenizer of the model: a text file, else what the package datasets
    loads, by folder or name; but not data of bamboo or of a factory, nor a file of tokens. Raises UserError for a model
    beside it, and for random weights without a path.
    """
    if not path:
        problem = Problem("--hf-random", "--hf ID_OR_FOLDER with it")
        if is_random:
            raise UserError([problem])
        return {}, {}
    if values.get("model") is not None:
        raise UserError([Problem("--hf", "no other model with it", repr(values["model"]))])
    fields, args = {"model": MODEL}, dict[str, Scalar]({"model_args.path": path})
    if is_random:
        args["model_args.random"] = True
    data = values.get("data")
    if isinstance(data, str) and not (data in ("", *BUILT_IN) or data.endswith(".bin") or FACTORY.fullmatch(data)):
        fields["data"], argument = (TEXT, "file") if data.endswith(".txt") else (DATASET, "name")
        args |= {f"data_args.{argument}": data, "data_args.tokenizer": path}
    return fields, args

"""The fields of a job that trains a model of transformers: ``bamboo run --hf ID`` stands for them."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.errors import Problem, UserError
from engine.core.units import Scalar

MODEL = "engine.models.hugging_face:pretrained"
TEXT = "engine.models.hugging_face:text"


def hugging_face_fields(
    path: str, is_random: bool, given: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, Scalar]]:
    """Returns fields as texts, and arguments by dotted name, of a job with the model of an ID or a folder.

    A text file as the data of the `given` fields is read with the tokenizer of the model. Raises UserError for a model
    beside it, and for random weights without a path.
    """
    if not path:
        problem = Problem("--hf-random", "--hf ID_OR_FOLDER beside it")
        if is_random:
            raise UserError([problem])
        return {}, {}
    if given.get("model") is not None:
        raise UserError([Problem("--hf", "no other model beside it", repr(given["model"]))])
    fields, args = {"model": MODEL}, dict[str, Scalar]({"model_args.path": path})
    if is_random:
        args["model_args.random"] = True
    if (data := str(given.get("data") or "")).endswith(".txt"):
        fields["data"] = TEXT
        args |= {"data_args.file": data, "data_args.tokenizer": path}
    return fields, args

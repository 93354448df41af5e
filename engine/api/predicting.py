"""The call that runs a trained model over samples from a Python program: ``bamboo.predict``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api.run import RunChild, TrainingRun, error_of
from engine.api.training import called_with
from engine.core.errors import Problem, UserError

if TYPE_CHECKING:
    from torch import Tensor


def predict(
    run: TrainingRun | str | os.PathLike[str] = "latest",
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    data: object = None,
    samples: str = "",
    limit: int = 0,
    dims: Sequence[int | None] = (0,),
    quiet: bool = True,
    trust_code: bool = False,
    **values: object,
) -> Tensor | dict[str, Tensor]:
    """Returns the outputs of a trained model over samples, each once and in order, as `bamboo predict` computes them.

    `run` is a run, or a folder or URL of checkpoints, ``@STEP`` behind it. The samples are `inputs`, with a row for
    each one (a model with several inputs takes them by name), or those of the data that `samples` names, the first
    `limit` of them. `dims` has the dimension of the samples in each output; None leaves an output out. `trust_code`
    allows code that a checkpoint elsewhere names. `values` are fields of the job, such as `stages`. Returns a tensor,
    or several by name: ``output.0``, ``output.1``.

    Raises:
        UserError: an argument that does not fit the run.
        BambooError: the workers cannot start, or did not recover; its class tells why.
    """
    from safetensors.torch import load_file, save_file

    if inputs is not None and samples:
        raise UserError([Problem("samples", "no name with inputs", repr(samples), "", "predict()")])
    origin = str(run.folder) if isinstance(run, TrainingRun) else os.fspath(run)
    of_outputs = ",".join("-" if dim is None else str(dim) for dim in dims)
    keywords, folders = called_with(data, values)
    with tempfile.TemporaryDirectory(prefix="bamboo-predict-") as place:
        output, file = Path(place, "outputs.safetensors"), Path(place, "inputs.safetensors")
        options = ["--from", origin, "--output", str(output), "--limit", str(limit), f"--dims={of_outputs}"]
        options += ["--samples", samples] if samples else []
        options += ["--trust-code"] if trust_code else []
        if inputs is not None:
            named = inputs if isinstance(inputs, Mapping) else {"input": inputs}
            save_file({name: each.detach().cpu().contiguous() for name, each in named.items()}, file)
            options += ["--input", str(file)]
        child = RunChild(options, keywords, folders, quiet=quiet, command="predict")
        try:
            word = child.word()
        except BaseException:
            child.stop()
            raise
        if word["exit_code"]:
            raise error_of(word)
        outputs = load_file(output)
    return outputs.get("output", outputs)

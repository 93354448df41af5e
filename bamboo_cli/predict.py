"""`bamboo predict`: the merged outputs of a trained model over samples, on a pipeline of workers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.echo import echo
from bamboo_cli.host_options import InstructionSet, fixing
from bamboo_cli.job_options import JobValues, checkpoint_of, resolve_options, takes_job_values
from bamboo_cli.report import DEFAULT_RESULTS
from bamboo_cli.run_options import Keywords, Tee, announcing, caller_layer, scenario_of
from bamboo_cli.run_result import print_result
from engine.core.errors import ExitCode, Problem, UserError
from engine.core.job.bit_fields import prediction_of
from engine.core.monitors import NO_MONITORS
from engine.core.texts import counted

if TYPE_CHECKING:
    from engine.files.jobs.resolved_job import ResolvedJob
    from engine.harness.case import CaseResult

EPILOG = (
    "Examples:  bamboo predict --output out.safetensors  |  bamboo predict --from latest@39 --samples test --output "
    "logits.npy  |  bamboo predict --from RUN --input rows.safetensors --output out.csv  |  bamboo predict --data "
    "mine:rows --samples training --limit 1000 --stages 3 --output out.safetensors"
)
_FOLDER = "predictions"  # in the folder of results: `latest` stays the newest training
From = Annotated[
    str, typer.Option("--from", metavar="latest|RUN|DIR[@STEP]", help="A run, or a folder or URL of checkpoints.")
]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="FILE.safetensors; for one output also FILE.npy or FILE.csv."),
]
Samples = Annotated[
    str,
    typer.Option(
        "--samples",
        metavar="NAME",
        help="Name of an evaluation set, or training (default: the first evaluation set, else training).",
    ),
]
Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="Take samples from FILE.safetensors or FILE.npy: the model's inputs as in training, one row per sample.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=0, help="The first N samples; 0 = all.")]
Dims = Annotated[
    str,
    typer.Option(
        "--dims", metavar="N,N,...", help="For each output, the dimension along which microbatches are concatenated "
        "(its batch dimension); - drops that output."
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and progress to stderr.")]


@takes_job_values
def predict(
    values: JobValues,
    *,
    output: Output,
    origin: From = "latest",
    samples: Samples = "",
    input_file: Input = None,
    limit: Limit = 0,
    dims: Dims = "0",
    tee: Tee = False,
    isa: InstructionSet = "",
    as_json: AsJson = False,
    keywords: Keywords = False,
) -> None:
    """Run a trained model over samples, forwards only, and write its merged outputs to a file.

    The outputs contain each sample once, in order. The checkpoint supplies the job; --stages, --microbatch-size and the
    like may change. Prediction survives dead workers as training does; its run folder is in RESULTS/predictions.
    """
    from engine.harness.predictions import dims_for, write_prediction

    if problems := fixing(isa):
        raise UserError(problems)
    of_outputs = dims_for(output, dims)
    if input_file is not None and samples:
        raise UserError([Problem("--samples", "no name with --input", repr(samples))])
    source = {"file": str(input_file.absolute())} if input_file is not None else {"samples": samples}
    resolved = _resolved(values, origin, {**source, "rows": limit}, is_called=keywords)
    result = _run(resolved, tee=tee, is_announced=keywords)
    if result.exit_code or result.run_error is not None:
        raise typer.Exit(print_result(result, resolved, as_json))
    shapes = write_prediction(result.folder, output, of_outputs)
    if as_json:
        facts = {"run_dir": str(result.folder), "outcome": "finished", "exit_code": int(ExitCode.OK), "error": None}
        echo(json.dumps(facts | {"output": str(output), "outputs": shapes}))
        return
    text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    deaths = counted(len(result.recoveries), "recovery", "recoveries")
    echo(f"{text} in {str(output)!r}" + f", {deaths}" * bool(result.recoveries))


def _resolved(values: JobValues, where: str, args: dict[str, Any], *, is_called: bool) -> ResolvedJob:
    """Returns the job of a checkpoint as one that predicts: it begins behind that step, and ends there."""
    from engine.files.jobs.checkpoint_choice import refuse_other_bits

    results = Path(values["results"] or os.environ.get("BAMBOO_RESULTS") or DEFAULT_RESULTS)
    choice = checkpoint_of(where, results)
    resolved = resolve_options(values, kept=choice.document, last=caller_layer() if is_called else None)
    step = choice.origin.step
    job = replace(prediction_of(resolved.job, step, args), results=str(Path(resolved.job.results, _FOLDER)))
    refuse_other_bits(choice, job, other_bits=True)
    echo(f"using the weights after step {step} of run {choice.origin.run} ({choice.origin.place})", err=True)
    # By its step: a training that goes on keeps newer ones, and workers that begin again must have the same weights.
    origin = replace(choice.origin, other_bits=True, is_named=True, monitors=NO_MONITORS)
    return replace(resolved, job=job, origin=origin)


def _run(resolved: ResolvedJob, *, tee: bool, is_announced: bool) -> CaseResult:
    from engine.runtime.process.fork_client import ForkServer
    from engine.runtime.process.interrupts import holding

    with holding(), ForkServer() as server:
        from bamboo_cli.live import screen
        from engine.harness.case import case_of_job
        from engine.harness.case_runner import run_case

        scenario = scenario_of((), resolved.job, with_twin=False)
        case = case_of_job(resolved, scenario)
        return run_case(case, None, announcing(screen(tee=tee), is_announced), server)

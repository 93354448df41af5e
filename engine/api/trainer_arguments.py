"""The arguments of `bamboo.hf.Trainer`: which ones have a meaning here, and the fields of the job that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any

from engine.core.errors import Problem, UserError
from engine.core.units import MOST_FLOAT

try:
    import accelerate  # noqa: F401
    import transformers
    from transformers.trainer_utils import SaveStrategy
except ModuleNotFoundError as error:
    problem = Problem(
        "bamboo.hf", "the packages transformers and accelerate", f"{error}", "pip install 'bamboo-train[hf]'"
    )
    raise UserError([problem]) from error
if not hasattr(transformers.Trainer, "_finalize_training"):
    raise UserError([Problem("bamboo.hf", "transformers 5.24 or later", transformers.__version__, "pip install -U it")])

# What trains, logs, evaluates and saves here as with the Trainer of transformers. Any other argument has its default.
_HONOURED = frozenset(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps
    average_tokens_across_devices max_grad_norm bf16 fp16 bf16_full_eval fp16_full_eval activation_checkpointing
    gradient_checkpointing use_cache logging_strategy logging_steps logging_first_step log_on_each_node log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model
    save_strategy save_steps save_on_each_node save_total_limit load_best_model_at_end metric_for_best_model
    greater_is_better full_determinism seed data_seed use_cpu dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns train_sampling_strategy
    length_column_name do_train do_eval do_predict resume_from_checkpoint
    """.split()
)
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_SPLITS = "bamboo splits the model itself: give stages, and pipelines in bamboo={...}"
_WAYS_OUT: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), _SPLITS),
    "push_to_hub": "call trainer.push_to_hub() after train()",
    "eval_on_start": "call evaluate() before train()",
    "label_names": "name the column labels",
    "torch_compile": "the layers of a stage run one by one",
    "resume_from_checkpoint": "give it to train()",
}
_METHODS = (
    *("compute_loss", "training_step", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
    *("get_batch_samples", "get_decay_parameter_names"),
)
_TAKEN = frozenset(
    """
    model model_args data data_args collate loss loss_args microbatches microbatch_size steps epochs seed lr
    lr_schedule lr_args warmup_steps optimizer optimizer_args param_groups clip_norm dtype loss_normalisation
    variable_shapes validate_every checkpoint_every checkpoints keep best results init activation_checkpoint resume hf
    hf_random job callbacks
    """.split()
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """The arguments of transformers, the number of `stages`, and other arguments of `bamboo.train` by name.

    For example ``bamboo={"pipelines": 2, "kills": ["30:1"]}``.
    """

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "bamboo"]  # noqa: RUF012 (no field)

    stages: int = field(default=2, metadata={"help": "Stages of the pipeline, each in a process of its own."})
    bamboo: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Other arguments of bamboo.train, as JSON."}
    )


def refuse_arguments(args: Any) -> None:
    """Raises UserError with every argument that has a value without a meaning here."""
    usual = transformers.TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    problems = [
        Problem(name, f"{getattr(usual, name)!r}, its default", repr(value), _WAYS_OUT.get(name, "leave it out"))
        for name in (each.name for each in fields(transformers.TrainingArguments))
        if name not in _HONOURED and (value := getattr(args, name)) != getattr(usual, name)
    ]
    if args.optim not in _OPTIMIZERS:
        problems.append(Problem("optim", " or ".join(_OPTIMIZERS), repr(str(args.optim.value)), "AdamW trains here"))
    if args.world_size > 1:
        hint = "start the script with python, not with torchrun or accelerate launch: bamboo starts the workers"
        problems.append(Problem("world_size", "1", repr(args.world_size), hint))
    problems += [
        Problem(f"bamboo.{name}", "another argument of bamboo.train", "", "the Trainer gives this one")
        for name in options_of(args)
        if name in _TAKEN
    ]
    if problems:
        raise UserError(problems)


def refuse_parts(trainer: type, arguments: Mapping[str, Any]) -> None:
    """Raises UserError for parts of a Trainer that would have to run in the workers: objects, and own methods."""
    hint = "the loss and the update are computed in the workers: bamboo.train takes your own by name"
    names = [name for name, value in arguments.items() if value is not None and value != (None, None)]
    problems = [Problem(name, "None", type(arguments[name]).__name__, hint) for name in names]
    problems += [
        Problem(name, "the method of transformers.Trainer", f"that of {trainer.__name__}", hint)
        for name in _METHODS
        if getattr(trainer, name) is not getattr(transformers.Trainer, name)
    ]
    if problems:
        raise UserError(problems)


def refuse_model(model: object) -> None:
    """Raises UserError for a model that `--hf` could not load from a folder: it needs float32 and a known class."""
    if not isinstance(model, transformers.PreTrainedModel):
        hint = "another module trains with bamboo.train(model, ...)"
        raise UserError([Problem("model", "a PreTrainedModel", type(model).__name__, hint)])
    name = type(model).__name__
    if getattr(transformers, name, None) is not type(model):
        hint = "a worker loads it by this name; bamboo.train takes a factory of your own"
        raise UserError([Problem("model", "a class of transformers", repr(name), hint)])
    if other := {str(each.dtype) for each in model.parameters()} - {"torch.float32"}:
        hint = "load it with dtype=torch.float32; bf16=True or fp16=True trains under autocast"
        raise UserError([Problem("model", "float32 weights", ", ".join(sorted(other)), hint)])


def options_of(args: Any) -> dict[str, Any]:
    """Returns the arguments of `bamboo.train` that the arguments of a Trainer have beside their own."""
    options = getattr(args, "bamboo", None) or {}
    return json.loads(options) if isinstance(options, str) else dict(options)


def update_fields(args: Any, steps: int, undecayed: Iterator[str], names: list[str]) -> dict[str, Any]:
    """Returns the fields of a job about the update of the weights, which take `steps` steps.

    `undecayed` are the parameters without weight decay among the `names` of all.
    """
    more = dict(args.lr_scheduler_kwargs or {})
    fields_of_job: dict[str, Any] = {
        "optimizer": "adamw",
        "optimizer_args": {
            **{"beta1": args.adam_beta1, "beta2": args.adam_beta2, "eps": args.adam_epsilon},
            "weight_decay": args.weight_decay,
        },
        "lr": args.learning_rate,
        "lr_schedule": "engine.models.trainer_batches:rate_factor",
        "lr_args": {"kind": args.lr_scheduler_type.value, "warmup": args.get_warmup_steps(steps), "steps": steps}
        | more,
        "warmup_steps": 0,
        "clip_norm": min(float(args.max_grad_norm or 0.0), MOST_FLOAT),
        "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
    }
    if args.weight_decay and (pattern := _pattern(set(undecayed), names)):
        fields_of_job["param_groups"] = f"{pattern}: weight_decay=0"
    return fields_of_job


def _pattern(wanted: set[str], names: list[str]) -> str:
    """Returns a regular expression for some of the names: without the numbers of layers, if that is as good."""
    short = "|".join(sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in wanted}))
    if {name for name in names if re.fullmatch(short, name)} != wanted:
        short = "|".join(map(re.escape, sorted(wanted)))
    return f"^({short})$" if wanted else ""


def checkpoint_fields(args: Any, state: Any, steps_per_epoch: int) -> dict[str, Any]:
    """Returns the fields of a job about its checkpoints: one for each step whose weights the Trainer asks for."""
    strategies = {args.save_strategy.value: state.save_steps} if args.save_strategy != SaveStrategy.BEST else {}
    periods = [steps_per_epoch if kind == "epoch" else every for kind, every in strategies.items() if kind != "no"]
    if args.eval_strategy.value != "no":
        periods.append(steps_per_epoch if args.eval_strategy.value == "epoch" else state.eval_steps)
    every = gcd(*map(int, periods))
    is_read_later = args.eval_strategy.value != "no"  # an evaluation may be behind the run
    keep = args.save_total_limit if args.save_total_limit and not is_read_later else 10**6
    return {"checkpoint_every": str(every) if every else "end", "keep": keep}

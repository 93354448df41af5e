"""`bamboo.hf.Trainer`: the Trainer of transformers, whose training runs in the worker processes of bamboo.

Rules: data, logs, evaluations and saved files are those of transformers, in the process of the user. The training is a
run of bamboo, which never waits for this process: each committed step is followed by its callbacks, and the weights of
a step come from its checkpoint.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length

from engine.api.run import TrainingRun
from engine.api.trainer_arguments import (
    TrainingArguments,
    checkpoint_fields,
    options_of,
    refuse_arguments,
    refuse_model,
    refuse_parts,
    update_fields,
)
from engine.api.trainer_files import BatchWriter, LoadedBatch, StepPlan, kept_folder
from engine.api.training import train
from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError
from engine.core.job.hugging_face import MODEL
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.jobs.checkpoint_choice import CheckpointChoice, find_checkpoint
from engine.files.run_folder import LATEST, RunFolder
from engine.models.trainer_batches import rate_factor
from engine.observers.loggers import StepDone
from engine.observers.observers import LoggerFeed
from engine.runtime.checkpoint.export import weights_of

_POLL_S = 0.1
_PLACE = "bamboo"  # in the output folder: the runs, and the files for their workers
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,12})")


class _Steps:
    """A logger that calls a function with each committed step."""

    def __init__(self, step: Callable[[StepDone], None]):
        self.step = step


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A Trainer of transformers that trains in a pipeline of `args.stages` worker processes, and survives their death.

    `train`, `evaluate`, `predict`, `save_model` and the callbacks are those of transformers. Arguments without a
    meaning here are refused by name: UserError.
    """

    state: Any
    control: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
    ):
        args = TrainingArguments("tmp_trainer") if args is None else args
        refuse_arguments(args)
        objects = {"model_init": model_init, "compute_loss_func": compute_loss_func, "optimizers": optimizers}
        refuse_parts(type(self), {**objects, "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs})
        refuse_model(model)
        args._n_gpu = min(args.n_gpu, 1)  # the sizes of batches are those of one process
        args.save_only_model = True  # the state of the optimizer is in the checkpoints of the run
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.run: TrainingRun | None = None  # of the last call of `train`
        self._in_epoch = self._is_stopped = self._has_ended = False

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains, and returns the TrainOutput of transformers; the model then has the trained weights.

        With `resume_from_checkpoint` a run continues after its newest checkpoint, or after ``OUTPUT/checkpoint-N``.

        Raises:
            UserError: an argument or a data set that cannot be used, or other data than before a resume.
            BambooError: the run cannot start, or has failed; its class tells why.
        """
        if trial is not None:
            hint = "call train() for each set of arguments"
            raise UserError([Problem("trial", "None", type(trial).__name__, hint)])
        self.is_in_train, self._in_epoch, self._is_stopped, self._has_ended = True, False, False, False
        # As a training of transformers does: an evaluation reports the time of it otherwise.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        loader = self.get_train_dataloader()
        plan = self._plan(loader)
        output = Path(self.args.output_dir)
        resumed = _asked(resume_from_checkpoint, output) if resume_from_checkpoint else None
        self._begun_s = time.time()
        self._begin_state(plan)
        if resumed is not None and resumed.origin.step + 1 >= plan.steps:
            self._resume_state(resumed.origin.step + 1)
            self._take(weights_of(checkpoints_at(resumed.origin.place), resumed.manifest), resumed.origin.step)
        else:
            values = self._job(plan, loader, resumed)
            origin = f"{output / _PLACE / resumed.origin.run}@{resumed.origin.step}" if resumed else None
            self._train_in_run(train(resume=origin, **values), plan, ignore_keys_for_eval)
        return self._finalize_training(None, plan.steps * self._samples_per_step, self._begun_s)

    def _train_in_run(self, run: TrainingRun, plan: StepPlan, ignored: list[str] | None) -> None:
        """Follows a run to its end, and takes its weights."""
        self.run = run
        try:
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            self._follow(run, plan, ignored)
        except BaseException:
            run.stop()
            raise
        result = run.wait(check=not self._is_stopped)
        if self.state.global_step and not self._load(run, self.state.global_step - 1):
            raise StorageError(f"the run {run.name} ({result.outcome}) has no checkpoint of its last step")

    @property
    def _samples_per_step(self) -> int:
        return int(self.args.train_batch_size * self.args.gradient_accumulation_steps)

    def _plan(self, loader: Any) -> StepPlan:
        if not has_length(loader):
            hint = "a stream trains with bamboo.train(data=...)"
            raise UserError([Problem("train_dataset", "a data set with a length", "a stream", hint)])
        batches, accumulated = len(loader), self.args.gradient_accumulation_steps
        per_epoch = max(1, -(-batches // accumulated))
        steps = self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * per_epoch)
        return StepPlan(batches, accumulated, per_epoch, steps)

    def _begin_state(self, plan: StepPlan) -> None:
        callbacks = (*self.callback_handler.callbacks, self.control)
        stateful = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        self.state = TrainerState(stateful_callbacks=stateful)
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, plan.steps)
        self.state.init_training_references(self, plan.steps, math.ceil(plan.steps / plan.steps_per_epoch), None)
        self._tr_loss = torch.tensor(0.0, device=self.args.device)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = 0

    def _job(self, plan: StepPlan, loader: Any, resumed: CheckpointChoice | None) -> dict[str, Any]:
        """Returns the arguments of `bamboo.train`; writes the files that they name."""
        args, place = self.args, Path(self.args.output_dir) / _PLACE
        options = {"stages": getattr(args, "stages", 2), "quiet": True, **options_of(args)}
        pipelines = int(options.get("pipelines", 1))
        if plan.accumulated % pipelines:
            expected = f"a divisor of {plan.accumulated}, gradient_accumulation_steps"
            raise UserError([Problem("bamboo.pipelines", expected, repr(pipelines))])
        writer = BatchWriter(plan.accumulated, self._train_batch_size, self._counts_items)
        take = partial(self.get_batch_samples, device=torch.device("cpu"))
        data = kept_folder(place, "data", partial(writer.write, plan.steps_of(loader, take)))
        shape = {"rows": self._train_batch_size, "per_step": plan.accumulated}
        lengths = {"lengths": text} if (text := writer.lengths()) else {}
        factor = {"loss_factor": plan.accumulated} if writer.adds_losses and plan.accumulated > 1 else {}
        names = [name for name, each in self.model.named_parameters() if each.requires_grad]
        undecayed = {*names}.difference(self.get_decay_parameter_names(self.model))
        return {
            "model": MODEL,
            "model_args": {"path": str(self._model_folder(place, resumed)), "attention": self._attention, **factor},
            "data": "engine.models.trainer_batches:WrittenBatches",
            "data_args": {"folder": str(data), "microbatches": plan.accumulated // pipelines, **shape, **lengths},
            "microbatches": plan.accumulated // pipelines,
            "microbatch_size": self._train_batch_size,
            "steps": plan.steps,
            "seed": args.seed,
            "validate_every": 0,
            "results": str(place),
            "activation_checkpoint": int(bool(args.activation_checkpointing)),
            **({"device": "cpu"} if args.use_cpu else {}),
            **update_fields(args, plan.steps, iter(undecayed), names),
            **checkpoint_fields(args, self.state, plan.steps_per_epoch),
            **options,
        }

    @property
    def _attention(self) -> str:
        return str(getattr(self.model.config, "_attn_implementation", None) or "")

    def _counts_items(self, batch: LoadedBatch) -> bool:
        """Returns whether the model divides the loss of a batch by the number of items that it is given."""
        if not self.model_accepts_loss_kwargs:
            return False
        inputs, was_training = self._prepare_inputs(dict(batch)), self.model.training
        with torch.no_grad():
            model = self.model.eval()
            one, two = (self.compute_loss(model, dict(inputs), False, torch.tensor(items)) for items in (1, 2))
        self.model.train(was_training)
        return bool(one != 0) and bool(torch.isclose(one, 2 * two))

    def _model_folder(self, place: Path, resumed: CheckpointChoice | None) -> Path:
        """Returns the folder of the model with which a training begins; a resumed one keeps that of its checkpoint."""
        if resumed is not None:
            return Path(resumed.job["model_args"]["path"])
        return kept_folder(place, "model", self.model.save_pretrained)

    def _follow(self, run: TrainingRun, plan: StepPlan, ignored: list[str] | None) -> None:
        """Calls the callbacks for each committed step until the end of the run, in this thread."""
        feed = LoggerFeed(_Steps(partial(self._after_step, run, plan, ignored)), RunFolder(run.folder).events)
        while not feed.is_over:
            is_last = run.result is not None
            feed.read_on()
            if is_last:
                break
            time.sleep(_POLL_S)
        if self._in_epoch:
            self._end_epoch(run, ignored)

    def _after_step(self, run: TrainingRun, plan: StepPlan, ignored: list[str] | None, done: StepDone) -> None:
        if self._has_ended or done.step < self.state.global_step:  # lost and trained again, with the same bits
            return
        if self.state.global_step == 0 < done.step:
            self._resume_state(done.step)
        if not self._in_epoch:
            self._in_epoch = True
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        epoch, place = divmod(done.step, plan.steps_per_epoch)
        self.state.global_step = done.step + 1
        self.state.epoch = epoch + min(1.0, (place + 1) * plan.accumulated / plan.batches)
        self._tr_loss += done.loss
        self._last_done = done
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._log_evaluate_save(run, ignored)
        if place + 1 == plan.steps_per_epoch:
            self._end_epoch(run, ignored)
        if self.control.should_training_stop and self.state.global_step < plan.steps and not self._is_stopped:
            self._is_stopped = True
            run.stop()
            self._has_ended = self._load(run, done.step)  # else with a later step, the last one

    def _end_epoch(self, run: TrainingRun, ignored: list[str] | None) -> None:
        self._in_epoch = False
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_evaluate_save(run, ignored)

    def _resume_state(self, steps: int) -> None:
        """Takes the state that was saved after so many steps, with its logs, if there is one."""
        self.state.global_step = self._initial_global_step = self._globalstep_last_logged = steps
        file = os.path.join(self.args.output_dir, f"checkpoint-{steps}", "trainer_state.json")
        if os.path.isfile(file):
            before = TrainerState.load_from_json(file)
            for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
                setattr(self.state, name, getattr(before, name))
            self.state.stateful_callbacks = before.stateful_callbacks
            self._load_callback_state()

    def _log_evaluate_save(self, run: TrainingRun, ignored: list[str] | None) -> None:
        done, needs_weights = self._last_done, self.control.should_evaluate or self.control.should_save
        if needs_weights and not self._load(run, done.step):
            self.control.should_evaluate = self.control.should_save = False
            transformers.utils.logging.get_logger(__name__).warning(
                f"no checkpoint of step {done.step + 1} was kept: it is neither evaluated nor saved"
            )
        update = self.args.learning_rate * self._factor(done.step)
        self._maybe_log_save_evaluate(
            *(self._tr_loss, done.grad_norm, self.model, None, self.state.epoch, ignored, self._begun_s),
            learning_rate=update,
        )

    def _factor(self, step: int) -> float:
        steps = self.state.max_steps
        kind, warmup = self.args.lr_scheduler_type.value, self.args.get_warmup_steps(steps)
        return rate_factor(step, kind=kind, warmup=warmup, steps=steps, **(self.args.lr_scheduler_kwargs or {}))

    def _load(self, run: TrainingRun, step: int) -> bool:
        """Waits for the checkpoint of a step, and loads its weights; returns False if the run keeps none."""
        folder = checkpoints_at(RunFolder(run.folder).checkpoints)
        while True:
            is_over = run.result is not None
            steps = {name.step for name in folder.names()}
            if step in steps:
                break
            if is_over or max(steps, default=-1) > step:
                return False
            time.sleep(_POLL_S)
        try:
            weights = run.weights(step)
        except NothingMatchedError:
            return False
        self._take(weights, step)
        return True

    def _take(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        named = self.model.state_dict(keep_vars=True)
        loaded = {id(named[name]) for name in weights}  # a tied parameter may have one name of several
        if lacking := [name for name, each in named.items() if id(each) not in loaded]:
            raise StorageError(f"the checkpoint of step {step} lacks {', '.join(lacking[:3])}")
        self.model.load_state_dict(weights, strict=False)


def _asked(choice: str | bool, output: Path) -> CheckpointChoice:
    """Returns the checkpoint to resume from: the newest one, or that of a folder ``checkpoint-N``.

    Raises UserError for another folder, and NothingMatchedError without a checkpoint.
    """
    match = None if choice is True else _CHECKPOINT.fullmatch(Path(str(choice)).name)
    if choice is not True and (match is None or Path(str(choice)).parent.resolve() != output.resolve()):
        expected = f"True, or a folder checkpoint-N in {str(output)!r}"
        raise UserError([Problem("resume_from_checkpoint", expected, repr(choice))])
    step = f"@{int(match[1]) - 1}" if match else ""
    return find_checkpoint(f"{LATEST}{step}", output / _PLACE, lambda line: None)

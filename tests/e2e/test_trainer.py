"""`bamboo.hf.Trainer` beside the Trainer of transformers: one script, the same losses, and equal bits in every cut."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api.training import train
from engine.core.errors import UserError
from tests.e2e import hf_zoo
from tests.e2e.launcher import ROOT
from tests.runtime.test_ordinary_runs import assert_equal, plain_loop

pytest.importorskip("accelerate", reason="pip install 'bamboo-train[hf]'")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of transformers and accelerate, about themselves
SCRIPT = (ROOT / "docs" / "examples" / "run_clm.py").read_text(encoding="utf-8")
# The last step of a pass has fewer batches, and the last batch fewer rows.
COMMON = """
    --text {text} --use_cpu --per_device_train_batch_size 3 --gradient_accumulation_steps 4 --max_steps 6
    --learning_rate 0.01 --warmup_steps 1 --weight_decay 0.1 --logging_steps 1 --save_steps 2 --eval_strategy steps
    --eval_steps 2 --disable_tqdm true
"""
WITHOUT_PROCESSES: dict[str, Any] = {"in_process": True}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def main_of(text: str, name: str) -> Any:
    Path(f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def words(output: str, **more: object) -> list[str]:
    given = COMMON.format(text=ROOT / "docs" / "examples" / "sonnets.txt").split()
    bamboo = more.pop("bamboo", None)
    texts = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    return [*given, "--output_dir", output, *texts, *(["--bamboo", json.dumps(bamboo)] if bamboo else [])]


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def recorder(called: list[str], stops_at: int = 0) -> Any:
    """Returns a callback that notes its calls, and asks for the end of training after a step."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            called.append(f"step {state.global_step}")
            control.should_training_stop |= 0 < stops_at <= state.global_step

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            called.append("end")

    for name in ("train_begin", "epoch_begin", "epoch_end", "log", "evaluate", "save"):
        setattr(Recorder, f"on_{name}", lambda *given, name=name, **named: called.append(name))
    return Recorder()


def test_the_losses_of_transformers_and_equal_bits_in_one_stage_and_in_two_with_a_kill() -> None:
    """A callback asks for the end at a step that is evaluated: all three trainings have that one, and no more."""
    theirs = main_of(SCRIPT.replace("from bamboo.hf import", "from transformers import"), "theirs")
    ours = main_of(SCRIPT, "ours")
    before, now = list[str](), list[str]()
    plain = theirs(words("plain", max_steps=60), callbacks=[recorder(before, stops_at=6)])
    one = ours(words("one", max_steps=60, stages=1, bamboo=WITHOUT_PROCESSES), callbacks=[recorder(now, stops_at=6)])
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss", "eval_accuracy", "epoch", "train_loss"):
        assert logged(one, name) == pytest.approx(logged(plain, name), rel=1e-4), name
    assert now == before
    assert [each for each in now if each.startswith("step")] == [f"step {step}" for step in range(1, 7)]
    assert_equal(weights(one), one.run.weights(5))
    given = words("two", max_steps=60, stages=2, bamboo={"kills": ["3:1"], "twin": False})
    two = ours(given, callbacks=[recorder([], stops_at=6)])
    assert plain.state.global_step == one.state.global_step == two.state.global_step == 6
    assert len(two.run.result.recoveries) == 1
    assert_equal(weights(two), weights(one))
    assert_equal(type(one.model).from_pretrained("two").state_dict(), weights(one))
    assert {path.name for path in Path("two").glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (2, 4, 6)}


@pytest.mark.soak
def test_a_training_is_resumed_in_other_stages() -> None:
    ours = main_of(SCRIPT, "ours")
    whole = ours(words("out", stages=2, load_best_model_at_end=True, bamboo=WITHOUT_PROCESSES))
    again = ours(words("out", stages=1, resume_from_checkpoint="out/checkpoint-2", bamboo=WITHOUT_PROCESSES))
    assert again.run.result.plain["resumed_after"] == 1 and logged(again, "loss") == logged(whole, "loss")
    assert_equal(weights(again), weights(whole))
    assert again.train(resume_from_checkpoint=True).global_step == 6  # nothing is left to train
    assert_equal(weights(again), weights(whole))
    with pytest.raises(UserError, match=r"resume_from_checkpoint: expected True, or a folder checkpoint-N in 'out'"):
        again.train(resume_from_checkpoint="elsewhere/checkpoint-2")


@pytest.mark.soak
def test_a_callback_stops_the_run() -> None:
    more = {"max_steps": 400, "eval_strategy": "no", "save_strategy": "no", "stages": 2, "bamboo": WITHOUT_PROCESSES}
    called: list[str] = []
    trainer = main_of(SCRIPT, "stopped")(words("out", **more), callbacks=[recorder(called, stops_at=3)])
    steps = trainer.state.global_step
    assert 3 <= steps < 400 and trainer.run.result.outcome == "interrupted"
    assert [each for each in called if each.startswith("step")] == [f"step {1 + step}" for step in range(steps)]
    assert "end" in called
    assert_equal(weights(trainer), trainer.run.weights(steps - 1))


def test_losses_of_a_model_that_ignores_the_number_of_items_add_up_as_with_transformers() -> None:
    import transformers

    from bamboo.hf import Trainer, TrainingArguments

    given: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    given |= {"use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "report_to": "none", "learning_rate": 0.01}
    config = hf_zoo.config_of("bert_classifier")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    transformers.BertForSequenceClassification(config).save_pretrained("begin")
    rows = [hf_zoo.rows("bert_classifier").training[index] for index in range(8)]
    plain, ours = (
        made(transformers.BertForSequenceClassification.from_pretrained("begin"), args, train_dataset=rows)
        for made, args in (
            (transformers.Trainer, transformers.TrainingArguments("plain", **given)),
            (Trainer, TrainingArguments("out", stages=2, bamboo=WITHOUT_PROCESSES, **given)),
        )
    )
    plain.train(), ours.train()
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=1e-4), name


def test_what_has_no_meaning_is_refused_by_name() -> None:
    from bamboo.hf import Trainer, TrainingArguments

    model = hf_zoo.base()
    wrong: dict[str, Any] = {
        "label_smoothing_factor": 0.1,
        "push_to_hub": True,
        "optim": "adafactor",
    }
    with pytest.raises(UserError) as caught:
        Trainer(model, TrainingArguments("out", use_cpu=True, bamboo={"lr": 0.1}, **wrong))
    assert str(caught.value).splitlines() == [
        "label_smoothing_factor: expected 0.0, its default, found 0.1 (leave it out)",
        "push_to_hub: expected False, its default, found True (call trainer.push_to_hub() after train())",
        "optim: expected adamw_torch or adamw_torch_fused, found 'adafactor' (AdamW trains here)",
        "bamboo.lr: expected another argument of bamboo.train (the Trainer gives this one)",
    ]
    args = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=2)

    class Own(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            raise AssertionError

    with pytest.raises(
        UserError, match=r"compute_loss: expected the method of transformers.Trainer, found that of Own"
    ):
        Own(model, args)
    with pytest.raises(UserError, match=r"model_init: expected None"):
        Trainer(None, args, model_init=hf_zoo.base)
    with pytest.raises(UserError, match=r"model: expected float32 weights, found torch.bfloat16"):
        Trainer(hf_zoo.base().bfloat16(), args)
    with pytest.raises(UserError, match="model: expected a PreTrainedModel, found Linear"):
        Trainer(torch.nn.Linear(1, 1), args)
    with pytest.raises(UserError, match=r"train_dataset: expected a column of targets .*, found input_ids"):
        Trainer(model, args, train_dataset=[{"input_ids": [1, 2]}] * 2).train()
    rows = [{"input_ids": [3] * length, "labels": [3] * length} for length in (2, 3)]
    one_row = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=1)
    trainer = Trainer(model, one_row, train_dataset=rows)
    with pytest.raises(
        UserError, match=r"data_collator: expected batches of one size, or rows .* with an attention_mask"
    ):
        trainer.train()


@pytest.mark.soak
def test_a_model_by_folder_trains_from_python_like_a_plain_loop(tmp_path: Path) -> None:
    hf_zoo.config_of("gpt2").save_pretrained(tmp_path / "config")
    fixed: dict[str, Any] = {"warmup_steps": 0, "lr_schedule": "constant", "clip_norm": 0.0, "steps": 2, "stages": 2}
    sizes: dict[str, Any] = {"microbatches": 2, "microbatch_size": 2, "validate_every": 0}
    data = f"{hf_zoo.__name__}:gpt2_data"
    run = train(hf=tmp_path / "config", hf_random=True, data=data, in_process=True, quiet=True, **fixed, **sizes)
    run.wait()
    assert_equal(run.weights(), plain_loop(run.job))

"""Models of transformers: masks and padding, their loader, text in tokens, and weights out and in."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.core.errors import UserError
from engine.core.job.hugging_face import DATASET, MODEL
from engine.core.job.job import Job
from engine.models.data_sources import evaluation_sets, open_data
from engine.models.hugging_face import dataset, pretrained, save_config, text
from engine.models.layers import as_tensors
from engine.models.model_loader import build_model
from engine.models.traced import optional_masks as masks
from engine.models.traced import recorded, recorder
from engine.models.traced.optional_masks import MaskDecision, optional_masks
from engine.models.traced.recording import CodeLine
from engine.models.user_factory import made_by
from engine.runtime.stage.stage import build_layer
from tests.e2e import hf_zoo
from tests.e2e.hf_soak import job_of, trained
from tests.runtime.test_ordinary_runs import assert_equal, plain_loop, trajectory

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about itself
]
State = dict[str, Tensor]


def test_a_run_equals_a_plain_loop_and_its_weights_go_out_and_in(tmp_path: Path) -> None:
    job = replace(job_of("llama", tmp_path / "config"), steps=2)
    found, state, out = trained(job, tmp_path / "run")
    assert_equal(state, plain_loop(job))
    assert trajectory(job, "1:1:B:1") == found
    args = {**job.model_args, "path": str(out), "random": False}
    assert_equal(made_by("model", MODEL, args, 0).state_dict(), state)


def gradients(job: Job, steps: int) -> list[list[State]]:
    """Returns the gradients of some microbatches: of the pieces, and of the whole module."""
    data = open_data(job)
    model = build_model(job, data.facts, data)
    assert (len(model.layers) > 4, model.notes) == (True, ())
    layers = [build_layer(job, model, index) for index in range(len(model.layers))]
    whole = made_by("model", job.model, job.model_args, 0)
    whole.load_state_dict({name: tensor for each in layers for name, tensor in each.state_dict().items()})
    made = []
    for step in range(steps):
        batch = data.microbatch(step, 0, 0, job.microbatch_size)
        values = batch.inputs
        for layer in layers:
            values = as_tensors(layer(*values), "a layer")
        model.loss(values, batch.targets).backward()
        whole(**dict(zip(data.facts.form.names, batch.inputs, strict=True))).loss.backward()  # type: ignore[attr-defined]
        named = ([pair for each in layers for pair in each.named_parameters()], list(whole.named_parameters()))
        made.append([{name: one.grad for name, one in part if one.grad is not None} for part in named])
        for one in (one for part in named for _, one in part):
            one.grad = None
    return made


def padded(job: Job, steps: int) -> set[bool]:
    data = open_data(job)
    masks = (data.microbatch(step, 0, 0, job.microbatch_size).inputs[1] for step in range(steps))
    return {not bool(each.all()) for each in masks}


@pytest.mark.parametrize("name", ["mistral", "mixtral", "bert_classifier"])
def test_pieces_have_the_gradients_of_the_module_with_padding_and_without(name: str, tmp_path: Path) -> None:
    job = job_of(name, tmp_path)
    assert padded(job, 4) == {True, False}
    for pieces, whole in gradients(job, 4):
        assert_equal({key: pieces[key] for key in whole}, whole)


@pytest.mark.parametrize("name", ["t5_labels", "whisper_labels", "mbart_labels"])
def test_a_decoder_is_fed_by_the_labels(name: str, tmp_path: Path) -> None:
    """The module has one gradient for all uses of the embedding, the pieces have one for each use."""
    for pieces, whole in gradients(job_of(name, tmp_path), 2):
        tied = {key for key in whole if key not in pieces} | {"model.decoder.embed_tokens.weight"}
        assert tied <= {"shared.weight", "model.shared.weight", "model.decoder.embed_tokens.weight"}
        own = whole.keys() - tied
        assert_equal({key: pieces[key] for key in own}, {key: whole[key] for key in own})


@pytest.mark.parametrize("always", [True, False])
def test_a_mask_that_is_ignored_or_a_decision_that_is_baked_in_would_be_seen(
    always: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("llama", tmp_path)
    monkeypatch.setattr(MaskDecision, "__call__", lambda *others, **named: torch.tensor(always))
    pairs = gradients(job, 4)
    assert any(not torch.equal(pieces[key], whole[key]) for pieces, whole in pairs for key in whole)


@pytest.mark.parametrize(("function", "compared"), [("warn_if_padding_and_no_attention_mask", 0), ("another", 2)])
def test_a_forward_is_compared_with_one_alone_unless_transformers_only_warns(
    function: str, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CodeLine] = []
    real, calls = masks.only_warns, list[Any]()

    def told(line: CodeLine) -> bool:
        asked.append(line)
        return real(line._replace(function=function))

    monkeypatch.setattr(recorder, "only_warns", told)

    def alone(*given: Any) -> tuple[Tensor, ...]:
        calls.append(given)
        return ()

    monkeypatch.setattr(recorded, "_alone", alone)
    job = job_of("gpt2", tmp_path)
    data = open_data(job)
    notes = build_model(job, data.facts, data).notes
    assert {each.function for each in asked} == {"warn_if_padding_and_no_attention_mask"}
    assert (len(calls), len(notes)) == (compared, min(compared, 1))


class Untraced:
    """A recorder that sees no tensor."""

    def is_traced(self, tensor: Tensor) -> bool:
        return False

    def memory(self, tensor: Tensor) -> int | None:
        return None

    def record(self, target: Any, run: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError


def test_masks_and_attention_of_transformers_are_as_before_after_a_recording() -> None:
    from transformers import masking_utils, modeling_utils

    attentions = modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    before = masking_utils._ignore_causal_mask_sdpa, attentions["sdpa"]
    query = torch.ones(1, 1, 2, 4)
    with optional_masks(Untraced()):
        assert attentions["sdpa"] is not before[1]
        outputs, _ = attentions["sdpa"](torch.nn.Identity(), query, query, query, attention_mask=None)
    assert torch.equal(outputs, torch.ones(1, 2, 1, 4))
    assert (masking_utils._ignore_causal_mask_sdpa, attentions["sdpa"]) == before


def folder_of(place: Path) -> Path:
    """Returns a folder with a config and a tokenizer of ten words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    hf_zoo.config_of("gpt2").save_pretrained(place)
    words = Tokenizer(WordLevel({"?": 0, **{str(number): number for number in range(1, 11)}}, "?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(place)
    return place


def test_a_text_becomes_rows_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(" ".join(str(number % 10) for number in range(43)))
    made = text(file=str(file), length=4, tokenizer=str(folder_of(tmp_path / "model")))
    assert (len(made.training), [len(each) for each in made.evaluations.values()]) == (9, [1])
    row = made.training[1]
    assert row["input_ids"].tolist() == [4, 5, 6, 7]
    assert torch.equal(row["labels"], row["input_ids"])
    assert row["attention_mask"].tolist() == [1, 1, 1, 1]
    with pytest.raises(UserError, match="a text of 200 tokens or more, found 43 tokens"):
        text(file=str(file), length=100, tokenizer=str(tmp_path / "model"))


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = pytest.importorskip("datasets", reason="pip install datasets")
    monkeypatch.setattr(made.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return made


def test_texts_of_a_data_set_are_read_once_and_kept(
    tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [" ".join(str((number + word) % 10) for word in range(number % 5)) for number in range(30)]
    datasets.Dataset.from_dict({"text": texts, "other": texts}).save_to_disk(tmp_path / "texts")
    args: dict[str, Any] = {
        "name": str(tmp_path / "texts"),
        "tokenizer": str(folder_of(tmp_path / "model")),
        "length": 4,
    }
    rows = dataset(**args)["train"]
    tokens = [int(word) for text in texts for word in text.split()]
    assert [token for row in [*rows, *dataset(**args)["validation"]] for token in row["input_ids"]] == tokens
    assert rows[3] == {"input_ids": tokens[12:16], "attention_mask": [1] * 4, "labels": tokens[12:16]}
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", None)  # as another worker would call it
    assert dataset(**args)["train"][:] == rows[:]
    with pytest.raises(TypeError):
        dataset(**{**args, "length": 5})


def test_columns_of_a_data_set_are_taken_as_they_are_and_a_text_with_a_label_is_a_row(
    tmp_path: Path, datasets: Any
) -> None:
    place = str(folder_of(tmp_path / "model"))
    sets = {"train": [[1, 2, 3], [4, 5, 6]], "test": [[7, 8, 9]]}
    made = {name: datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}) for name, ids in sets.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "tokens")
    job = Job(data=DATASET, data_args={"name": str(tmp_path / "tokens"), "tokenizer": place}, microbatch_size=2)
    batch = open_data(job).microbatch(0, 0, 0, 2)
    assert sorted(batch.inputs[0].tolist()) == sets["train"] and torch.equal(*batch.inputs)
    assert evaluation_sets(open_data(job)) == {"test": 1}
    labelled = {"text": ["1 2 3", "4", "5 6"], "label": [0, 1, 0]}
    datasets.Dataset.from_dict(labelled).save_to_disk(tmp_path / "labelled")
    args: dict[str, Any] = {"name": str(tmp_path / "labelled"), "tokenizer": place, "length": 2}
    with pytest.raises(UserError, match=r"data_args\.tokenizer: expected a tokenizer with a padding token"):
        dataset(**args)
    padding = {"pad_token": "10"}
    transformers.AutoTokenizer.from_pretrained(place, **padding).save_pretrained(place)
    rows = list(dataset(**args)["train"])
    assert [(row["input_ids"], row["attention_mask"], row["label"]) for row in rows] == [
        ([1, 2], [1, 1], 0),
        ([4, 10], [1, 0], 1),
    ]


def test_mistakes_with_a_data_set(tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--data: expected a folder or a name that datasets can load, found 'no/such'"):
        dataset(name="no/such")
    monkeypatch.setattr(datasets, "__version__", "3.9.0")
    with pytest.raises(UserError, match=r"--data: expected the package datasets 4 or newer, found 3\.9\.0"):
        dataset(name="no/such")


def test_a_data_set_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"--data: expected the package datasets, .*\(pip install datasets\)"):
        dataset(name="no/such")


def test_the_config_and_the_tokenizer_go_out_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save_config({"path": str(folder_of(tmp_path / "model"))}, tmp_path / "out")
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert type(pretrained(path=str(tmp_path / "out"), random=True)).__name__ == "GPT2LMHeadModel"


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--hf: expected an ID or a folder that transformers can load, found 'no/such'"):
        pretrained(path="no/such", random=True)
    folder = folder_of(tmp_path)
    with pytest.raises(UserError, match=r"model_args\.architecture: expected a class of transformers, found 'Gpt9'"):
        pretrained(path=str(folder), architecture="Gpt9")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"--hf: expected the package transformers, .*bamboo-train\[hf\]"):
        pretrained(path=str(folder))


def test_random_weights_come_from_the_key_and_no_model_has_a_cache(tmp_path: Path) -> None:
    args: dict[str, Any] = {"path": str(folder_of(tmp_path)), "random": True}
    one, same, other = (made_by("model", MODEL, args, key) for key in (1, 1, 2))
    assert_equal(one.state_dict(), same.state_dict())
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.config.use_cache is False


def test_no_code_and_no_pickle_of_a_model_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal is asked for the code otherwise, and answers yes here."""
    job_of("llama", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        pretrained(path=str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "theirs", "auto_map": classes}))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it has run')")
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    with pytest.raises(UserError, match="contains custom code"):
        pretrained(path=str(tmp_path), random=True)

"""What ``--hf`` stands for."""

from __future__ import annotations

import pytest

from engine.core.errors import UserError
from engine.core.job.hugging_face import BUILT_IN, MODEL, hugging_face_fields
from tests.looped import looped


def test_nothing_is_asked_for() -> None:
    assert hugging_face_fields("", False, {"model": "gpt"}) == ({}, {})


def test_an_id_becomes_the_factory_and_its_argument() -> None:
    assert hugging_face_fields("gpt2", False, {"model": None, "data": "mine:rows"}) == (
        {"model": MODEL},
        {"model_args.path": "gpt2"},
    )
    assert hugging_face_fields("gpt2", True, {})[1] == {"model_args.path": "gpt2", "model_args.random": True}


def test_a_text_is_read_with_the_tokenizer_of_the_model() -> None:
    fields, args = hugging_face_fields("gpt2", False, {"data": "a.txt"})
    assert fields == {"model": MODEL, "data": "engine.models.hugging_face:text"}
    assert args == {"model_args.path": "gpt2", "data_args.file": "a.txt", "data_args.tokenizer": "gpt2"}


def test_another_name_is_of_the_package_datasets() -> None:
    fields, args = hugging_face_fields("gpt2", False, {"data": "org/novels"})
    assert fields == {"model": MODEL, "data": "engine.models.hugging_face:dataset"}
    assert args == {"model_args.path": "gpt2", "data_args.name": "org/novels", "data_args.tokenizer": "gpt2"}


@looped("data", [*BUILT_IN, "mine:rows", "tokens.bin"])
def test_data_of_bamboo_and_of_a_factory_stay(data: str) -> None:
    assert hugging_face_fields("gpt2", False, {"data": data})[0] == {"model": MODEL}


def test_mistakes() -> None:
    with pytest.raises(UserError, match="--hf: expected no other model with it, found 'gpt'"):
        hugging_face_fields("gpt2", False, {"model": "gpt"})
    with pytest.raises(UserError, match="--hf-random: expected --hf ID_OR_FOLDER with it"):
        hugging_face_fields("", True, {})

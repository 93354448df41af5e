"""Parameter groups: the text of a job, the first match, and groups that have no parameter."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.core.job.update_rules import ParamGroup, as_text, group_of, idle_groups, param_groups
from tests.looped import looped

NAMES = ("embedding.weight", "blocks.0.norm.bias", "blocks.0.linear.weight", "head.bias")


def test_a_text_has_patterns_with_arguments() -> None:
    assert param_groups("bias|norm: weight_decay=0; ^head: lr=0.1, betas=0.8,0.9, amsgrad=true;") == (
        ParamGroup("bias|norm", 1.0, {"weight_decay": 0}),
        ParamGroup("^head", 0.1, {"betas": "0.8,0.9", "amsgrad": True}),
    )
    assert param_groups("(?:a|b): lr=2") == (ParamGroup("(?:a|b)", 2.0, {}),)  # the last colon counts
    assert param_groups("") == ()


def test_a_group_may_have_the_rate_0_which_freezes_it() -> None:
    assert param_groups("^head: lr=0") == (ParamGroup("^head", 0.0, {}),)


@looped(
    ("text", "told"),
    [
        ("weight_decay=0", "has no pattern before a colon"),
        (": lr=1", "has no pattern before a colon"),
        ("(: lr=1", "'(' is not a regular expression"),
        ("bias:", "'' is not NAME=VALUE"),
        ("bias: lr", "'lr' is not NAME=VALUE"),
        ("bias: lr=1, lr=2", "'lr' stands twice for 'bias'"),
        ("bias: lr=-1", "lr of 'bias' is -1, and not a factor"),
        ("bias: lr=much", "lr of 'bias' is 'much', and not a factor"),
        ("bias: lr=nan", "lr of 'bias' is nan, and not a factor"),
    ],
)
def test_a_wrong_part_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        param_groups(text)


def test_a_list_of_a_file_is_the_same_text() -> None:
    groups: list[dict[str, Any]] = [
        {"match": "bias|norm", "weight_decay": 0},
        {"match": "^head", "lr": 0.1, "betas": [0.8, 0.9], "amsgrad": True},
    ]
    text = as_text(groups)
    assert text == "bias|norm: weight_decay=0; ^head: lr=0.1, betas=0.8,0.9, amsgrad=true"
    assert param_groups(text)[1] == ParamGroup("^head", 0.1, {"betas": "0.8,0.9", "amsgrad": True})


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ({"lr": 1}, "'match'"),
        ({"match": "a"}, "arguments"),
        ({"match": "a;b", "lr": 1}, r"\x3b"),
        ({"match": "a", "x": {}}, "value of an argument"),
    ],
)
def test_a_list_of_another_form_is_refused(group: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        as_text([group])


def test_the_first_match_counts() -> None:
    first, second = groups = param_groups("norm: lr=1; bias: lr=2")
    assert [group_of(groups, name) for name in NAMES] == [None, first, None, second]
    assert idle_groups(groups, NAMES) == []


def test_a_group_without_a_parameter_is_told_with_names() -> None:
    (missing,) = idle_groups(param_groups("haed: lr=1"), NAMES)
    assert (missing.found, missing.hint) == ("'haed'", f"the names are {', '.join(NAMES)}")
    (hidden,) = idle_groups(param_groups("bias: lr=1; head: lr=2"), NAMES)
    assert hidden.hint == "an earlier group has each of its parameters, such as head.bias"

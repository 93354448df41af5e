"""Every kind of mistake in YAML has its place and message; all other YAML is read by version 1.2."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.files.strict_yaml import MAX_BYTES, read_scalar, read_text, read_yaml
from tests.looped import looped

INDENT = "indent this line as its neighbours: keys of one mapping, and items of one list, begin in one column"


def problems(text: str) -> list[str]:
    return [str(problem) for problem in read_text(text, "job.yaml").problems]


ONE_WAY = "expected a value that reads only one way, found"
TWICE = "expected one value, found a second one"


@looped(
    ("text", "message"),
    [
        # Values on which YAML readers disagree.
        ("a: yes", f"job.yaml:1:4: a: {ONE_WAY} 'yes' (write true or false, or quote it)"),
        ("a: Off", f"job.yaml:1:4: a: {ONE_WAY} 'Off' (write true or false, or quote it)"),
        ("a: n", f"job.yaml:1:4: a: {ONE_WAY} 'n' (write true or false, or quote it)"),
        ("a:\n  b: on", f"job.yaml:2:6: a.b: {ONE_WAY} 'on' (write true or false, or quote it)"),
        ("a: [1, NO]", f"job.yaml:1:8: a.1: {ONE_WAY} 'NO' (write true or false, or quote it)"),
        ("a: 1:30", f"job.yaml:1:4: a: {ONE_WAY} '1:30' (quote it: YAML 1.1 counts in sixties here)"),
        ("a: 1:30:00.5", f"job.yaml:1:4: a: {ONE_WAY} '1:30:00.5' (quote it: YAML 1.1 counts in sixties here)"),
        (
            "a: 010",
            f"job.yaml:1:4: a: {ONE_WAY} '010' (write it without the leading 0, or as 0o17 for octal, or quote it)",
        ),
        ("a: 1_000", f"job.yaml:1:4: a: {ONE_WAY} '1_000' (write plain digits, or quote it)"),
        ("a: 0b11", f"job.yaml:1:4: a: {ONE_WAY} '0b11' (write plain digits, or quote it)"),
        ("a: " + "9" * 100, f"job.yaml:1:4: a: {ONE_WAY} '{'9' * 100}' (quote it: too long for a number)"),
        # Keys.
        ("a: 1\nb: 2\na: 3", f"job.yaml:3:1: a: {TWICE} (the first is in line 1)"),
        ("m: {x: 1, x: 2}", f"job.yaml:1:11: m.x: {TWICE} (the first is in line 1)"),
        ("1: a", "job.yaml:1:1: expected a text key, found '1' (quote it)"),
        ("m:\n  on: 1", "job.yaml:2:3: m: expected a text key, found 'on' (quote it)"),
        ("~: 1", "job.yaml:1:1: expected a text key, found '~' (quote it)"),
        ("true: 1", "job.yaml:1:1: expected a text key, found 'true' (quote it)"),
        ("? [a]\n: 1", "job.yaml:1:3: expected a text key, found an alias, a list or a mapping"),
        ("<<: {a: 1}", "job.yaml:1:1: expected no merge key, found '<<' (write its keys out)"),
        # Forms whose value differs from their text.
        ("a: &x 1", "job.yaml:1:4: a: expected no anchor, found '&x' (remove it)"),
        ("&x a: 1", "job.yaml:1:1: expected no anchor, found '&x' (remove it)"),
        ("a: *x", "job.yaml:1:4: a: expected no alias, found '*x' (write the value out)"),
        ("a: !!int 1", "job.yaml:1:4: a: expected no tag, found '!!int' (remove it)"),
        (
            "a: !!python/object:os.system {}",
            "job.yaml:1:4: a: expected no tag, found '!!python/object:os.system' (remove it)",
        ),
        ("a: !mine [1]", "job.yaml:1:4: a: expected no tag, found '!mine' (remove it)"),
        ("a: 1\n---\nb: 2", "job.yaml:2:1: expected one document, found a second one (remove what follows)"),
        # Text that the parser refuses.
        (
            "a: b: c",
            "job.yaml:1:5: expected readable YAML (quote the value, which has a second ': ')",
        ),
        ("a:\n\tb: 1", "job.yaml:2:1: expected readable YAML (indent with spaces, not tabs)"),
        ("a:\n  b: 1\n   c: 2", f"job.yaml:3:5: expected readable YAML ({INDENT})"),
        ("a:\n  b: 1\n c: 2", f"job.yaml:3:2: expected readable YAML ({INDENT})"),
        ("a:\n- b: 1\n - c", f"job.yaml:3:2: expected readable YAML ({INDENT})"),
        ("a: 1\nb\nc: 2", "job.yaml:3:1: expected readable YAML (write ': ' between a key and its value)"),
        ("a: @x", "job.yaml:1:4: expected readable YAML (quote a value that begins with this character)"),
        (
            'a: "x" y',
            "job.yaml:1:8: expected readable YAML (quote the whole value, or indent this line as its neighbours)",
        ),
        ("a: [1, 2", "job.yaml:1:9: expected readable YAML (close each [ and {, and put commas between the values)"),
        ("a: 1\nb: \x07", r"job.yaml:2:4: expected readable YAML, found the control character '\x07'"),
        (r'a: "\UFFFFFFFF"', "job.yaml:1:7: expected readable YAML (an escape that names no character)"),
        ("[" * 30, "job.yaml:1:21: expected at most 20 levels, found a deeper one"),
    ],
)
def test_each_mistake_has_its_place_and_message(text: str, message: str) -> None:
    assert problems(text) == [message]


@pytest.mark.parametrize("name", ["\0", "a\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    """A scenario whose job file had it ended as an internal error."""
    with pytest.raises(UserError, match="expected a file that can be read, found "):
        read_yaml(Path(name))


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    text = "a: yes\n2: x\nm:\n  w: 010\n  w: 1\n  v: *w\nb: [\n"
    assert [line.split(": expected")[0] for line in problems(text)] == [
        "job.yaml:1:4: a",
        "job.yaml:2:1",
        "job.yaml:4:6: m.w",
        "job.yaml:5:3: m.w",
        "job.yaml:6:6: m.v",
        "job.yaml:8:1",
    ]


def test_depth_is_bounded_through_keys_too() -> None:
    assert "job.yaml:1:61: expected at most 20 levels, found a deeper one" in problems("{? " * 1000)
    assert any("at most 20 levels" in line for line in problems("".join(" " * n + "1:\n" for n in range(40))))
    assert problems("[" * 20 + "]" * 20) == []


@looped(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0o17", 15),
        ("0x1F", 31),
        ("1e-3", 0.001),
        ("3.", 3.0),
        (".5", 0.5),
        ("-1.5E+2", -150.0),
        ("0.10", 0.1),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'yes'", "yes"),
        ('"010"', "010"),
        ("2026-01-02", "2026-01-02"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("2,4,6", "2,4,6"),
        ("=", "="),
        ("type:.*Block", "type:.*Block"),
        ("nope", "nope"),
        ("|\n  yes\n", "yes\n"),
    ],
)
def test_scalars_read_as_yaml_1_2_says(text: str, value: object) -> None:
    document = read_text(f"a: {text}", "job.yaml")
    assert document.problems == ()
    assert document.value == {"a": value}
    assert isinstance(document.value, dict)
    assert type(document.value["a"]) is type(value)


def test_nan_is_a_number() -> None:
    document = read_text("- .nan", "job.yaml")
    assert isinstance(document.value, list)
    assert isinstance(document.value[0], float)
    assert math.isnan(document.value[0])


def test_every_value_and_key_has_its_place() -> None:
    document = read_text("a: 1\nm:\n  w: [2,\n    3]\ny: {n: 1}\n", "job.yaml")
    assert document.value == {"a": 1, "m": {"w": [2, 3]}, "y": {"n": 1}}
    assert document.places == {
        (): (1, 1),
        ("a",): (1, 4),
        ("m",): (3, 3),
        ("m", "w"): (3, 6),
        ("m", "w", 0): (3, 7),
        ("m", "w", 1): (4, 5),
        ("y",): (5, 4),
        ("y", "n"): (5, 8),
    }
    assert document.key_places == {
        ("a",): (1, 1),
        ("m",): (2, 1),
        ("m", "w"): (3, 3),
        ("y",): (5, 1),
        ("y", "n"): (5, 5),
    }


def test_a_value_with_a_problem_is_left_out() -> None:
    assert read_text("a: yes\nb: [1, 010]\nc: 1\nc: 2\n", "job.yaml").value == {"c": 1}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_says_nothing(text: str) -> None:
    document = read_text(text, "job.yaml")
    assert (document.value, document.problems) == (None, ())


def test_files_are_bounded_and_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: yes")
    assert [(problem.line, problem.column) for problem in read_yaml(path).problems] == [(1, 4)]
    path.write_bytes("a: 1\nb: \u00e9".encode() + b"\xff")
    assert list(map(str, read_yaml(path).problems)) == [f"{path}:2:5: expected UTF-8 text, found b'\\xff'"]
    path.write_bytes(b"#" * MAX_BYTES)
    assert read_yaml(path).problems == ()
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert list(map(str, read_yaml(path).problems)) == [f"{path}: expected at most 1048576 bytes"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match="expected a file, found something else"):
        read_yaml(tmp_path / "pipe.yaml")


def test_a_file_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a file that can be read, found No such file or directory"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "job.yaml").touch()
    with pytest.raises(UserError, match=r"No such file or directory \(did you mean 'job.yaml'\?\)"):
        read_yaml(tmp_path / "job.yml")
    with pytest.raises(UserError, match=r"expected a file that can be read, found Is a directory$"):
        read_yaml(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", f"--lr: {ONE_WAY} 'yes' (write true or false, or quote it)"),
        ("[1]", "--lr: expected one value, found a list (separate values by commas, without brackets)"),
        ("a: b", "--lr: expected one value, found a mapping (quote it)"),
        ("1 # x", "--lr: expected one value, found '1 # x' (quote it)"),
        ("'x", "--lr: expected readable YAML (close the quote)"),
    ],
)
def test_one_value_on_the_command_line_is_as_strict(text: str, message: str) -> None:
    document = read_scalar(text, "--lr", "lr")
    assert document.value is None
    assert [str(problem) for problem in document.problems] == [message]


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("'1 # x'", "1 # x"), ("a#b", "a#b"), ("", None)])
def test_one_value_on_the_command_line_is_read(text: str, value: object) -> None:
    assert read_scalar(text, "--lr", "lr").value == value


# Without digits, y and n: PyYAML leaves some texts of them unquoted that this reader does not read as text. Without
# the rarer line breaks: PyYAML itself does not read them back.
CHARACTERS = st.characters(codec="utf-8", exclude_categories=["Nd", "Zl", "Zp"], exclude_characters="\x85ynYN")
TEXTS = st.text(CHARACTERS, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


@given(value=VALUES, flow=st.booleans())
def test_what_pyyaml_writes_reads_back(value: object, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    document = read_text(text, "job.yaml")
    assert document.problems == ()
    assert document.value == value


@given(text=st.text(st.sampled_from("ab1:-?[]{},&*!|>'\"%@`#~ \n\t\\U<=.0x_\x07\u00e9"), max_size=40))
def test_no_text_raises(text: str) -> None:
    document = read_text(text, "job.yaml")
    assert all(problem.line and problem.column for problem in document.problems)

"""The last words of a worker fit into a message whatever the user's exception is, and say where they were cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from engine.codec.messages import decode, encode, in_messages
from engine.codec.values import cut
from engine.core.errors import InvariantError, Problem, WorkerException
from engine.core.message_kinds import MAX_BYTES, TextsToAgent
from engine.core.messages import (
    CutMessage,
    DoneMessage,
    FailedMessage,
    FaultEffectMessage,
    PureMessage,
    RaisedMessage,
    RefusedMessage,
    SuspicionMessage,
)
from engine.core.program.inventory import InventoryMessage
from engine.models import user_code
from engine.models.user_code import RAISED, blame, exception_of, log_exception
from engine.runtime.process.link import packet
from engine.runtime.worker.worker import _told
from tests.e2e.launcher import Launcher

CJK, ASTRAL, LONE = "\u6a21", "\U0001f680", "\ud800"


class Raises(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class EndsInIt(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NoText(Exception):
    def __str__(self) -> str:
        number: Any = 5
        return number


class Recurses(Exception):
    def __str__(self) -> str:
        return str(self)


class Sleeps(Exception):
    def __str__(self) -> str:
        time.sleep(30)
        return "late"


class Closed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("closed")

    def __getattr__(self, name: str) -> object:
        raise TypeError(f"closed: {name}")


class BeyondException(BaseException):
    pass


def chain() -> Exception:
    error = Exception("innermost")
    for number in range(100_000):
        following = Exception(str(number))
        following.__cause__ = error
        error = following
    return error


def nest() -> Exception:
    error = Exception("innermost")
    for number in range(5_000):
        error = ExceptionGroup(str(number), [error])
    return error


def deep(number: int = 0) -> int:
    return deep(number + 1) + 1


ERRORS: dict[str, Callable[[], BaseException]] = {
    "14,000 CJK characters": lambda: RuntimeError(CJK * 14_000),
    "astral characters": lambda: RuntimeError(ASTRAL * 14_000),
    "lone surrogates": lambda: RuntimeError(LONE * 50_000),
    "NUL": lambda: RuntimeError("\0" * 50_000),
    "escapes": lambda: RuntimeError("\x1b[31m" * 50_000),
    "10 MB": lambda: RuntimeError("x" * 10_000_000),
    "10 MB of lines": lambda: RuntimeError("line\n" * 2_000_000),
    "its text raises": Raises,
    "its text ends the process": EndsInIt,
    "its text is no text": NoText,
    "its text recurses": Recurses,
    "its text takes long": Sleeps,
    "it refuses attributes": Closed,
    "no Exception": BeyondException,
    "a wide group": lambda: ExceptionGroup("wide", [ValueError(str(each)) for each in range(100_000)]),
    "a deep group": nest,
    "a deep chain": chain,
    "a wrong SyntaxError": lambda: SyntaxError("bad", ("mine.py", "first", None, None)),  # type: ignore[arg-type]
}


def raised(error: BaseException, place: str = "layer 2 (fc2)") -> BaseException:
    try:
        raise error
    except RAISED as caught:
        blame(caught, place)
        return caught


@pytest.mark.parametrize("name", ERRORS)
def test_any_exception_fits_into_the_last_message(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a text that raised SystemExit took the last words with it, and a wrong line ended the launcher."""
    monkeypatch.setattr(user_code, "_PATIENCE_S", 0.3)
    error = raised(ERRORS[name]())
    started_s, begun_s = time.thread_time(), time.monotonic()
    first, again = exception_of(error), exception_of(error)
    log_exception(error)
    assert time.thread_time() - started_s < 5
    assert time.monotonic() - begun_s < 30, "it waits for nothing; a busy machine takes longer"
    message = RaisedMessage(1, 2, first)
    data = packet(message)
    assert len(data) <= MAX_BYTES // 2  # cut text by text: nothing has lost its end to another text
    assert decode(data) == message
    assert first.error == again.error  # the same error twice ends the run
    assert type(error).__name__ in first.error and "fc2" in first.place
    assert first.error.isprintable() or "\n" in first.error
    assert capsys.readouterr().err


def test_cut_texts_say_that_they_were_cut_and_where_the_whole_is() -> None:
    """Before, a text ended in the middle of a word."""
    found = exception_of(raised(RuntimeError(f"begin {CJK * 14_000}")))
    assert found.error.startswith("RuntimeError: begin ")
    assert found.error.endswith("... (of 14020 characters; the log of the worker has them)")
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert "the log of the worker has them) ...\n" in found.traceback
    assert found.traceback.endswith("in layer 2 (fc2)\n")
    assert "alone: more than 100 others hang on it" in exception_of(raised(ERRORS["a wide group"]())).traceback


def test_deep_recursion_in_a_layer_is_told() -> None:
    """Before, 1,000 frames were formatted in the handler, without a limit on their size."""
    try:
        deep()
    except RecursionError as error:
        found = exception_of(error)
    assert found.error.startswith("RecursionError: maximum recursion depth")
    assert found.function == "deep" and len(packet(RaisedMessage(0, 0, found))) < 40_000


LONG = f"{CJK}{ASTRAL}{LONE}\0" * 10_000
MESSAGES = {
    "raised": RaisedMessage(0, 0, WorkerException(LONG, LONG, LONG, 1, LONG, LONG, LONG)),
    "refused": RefusedMessage(tuple(Problem(LONG, LONG, LONG, LONG, LONG) for _ in range(20))),
    "failed": FailedMessage(LONG, 3),
    "suffered": FaultEffectMessage("fault-1", LONG),
    "suspicion": SuspicionMessage(0, LONG, None),
    "cut": CutMessage(tuple(range(4096)), tuple(f"{number}-{CJK * 300}" for number in range(8192))),
    "done": DoneMessage({"text": LONG, "raised": [{"traceback": LONG} for _ in range(64)]}),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_with_texts_of_a_user_fits(kind: str) -> None:
    """Before, a message with a long text was an AssertionError in the worker that sent it."""
    message = MESSAGES[kind]
    found = decode(packet(message))
    assert type(found) is type(message)
    assert isinstance(message, TextsToAgent) or message.cut_note in str(found) or kind == "done"


def test_a_message_that_fits_keeps_every_character() -> None:
    message = RaisedMessage(0, 0, WorkerException(f"{CJK}{LONE}\0" * 8_000, "the loss"))
    assert decode(packet(message)) == message


def test_an_oversize_message_of_bamboo_itself_stays_a_loud_error() -> None:
    with pytest.raises(InvariantError, match=r"a message InventoryMessage of \d+ bytes does not fit a packet"):
        packet(InventoryMessage(0, token_hex(MAX_BYTES), ()))


@pytest.mark.parametrize("text", [CJK * 500, ASTRAL * 500, LONE * 500, "\0" * 500, "x" * 500, '\\"\n' * 500])
@pytest.mark.parametrize("most", [8, 9, 100, 101, 102, 103, 104, 105, 400])
def test_a_cut_counts_bytes_of_the_message(text: str, most: int) -> None:
    """Before, characters were counted: one beyond ASCII has six bytes or twelve."""
    found = cut(text, most, "... (cut)")
    assert len(encode(FailedMessage(found, 0))) - len(encode(FailedMessage("", 0))) <= most
    assert found.endswith("... (cut)" if most >= 100 else "...")
    assert text.startswith(found.removesuffix("... (cut)").removesuffix("..."))


def test_rows_with_long_names_travel_in_as_many_messages_as_they_need() -> None:
    """Before, 50 rows made a message, however long the names of the layers were."""
    rows = [(f"layer {number} ({cut(CJK * 5_000, 1_000, '...')})", {"output": "0" * 16}) for number in range(500)]
    parts = list(in_messages(rows))
    assert all(parts) and [row for part in parts for row in part] == rows
    assert 4 <= len(parts) <= 8 and max(len(packet(PureMessage(part))) for part in parts) <= MAX_BYTES
    assert list(in_messages([])) == []


def test_100000_mistakes_are_counted() -> None:
    """Before, each mistake was a part of one message."""
    told = _told([Problem("model_args.x", "a number", LONG)] * 100_000)
    assert "expected at most 100 mistakes, found 100000 (the log of the worker has all of them)" in str(told[-1])
    assert len(told) == 101 and len(packet(RefusedMessage(told))) <= MAX_BYTES


MODEL = """
from collections import OrderedDict
from torch import nn

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 40:
            raise RuntimeError("\\u6a21" * 14_000)
        return self.layer(x)

def model():
    named = OrderedDict({"first": nn.Linear(32, 32), "\u6a21" * 20_000: Broken()})
    return nn.Sequential(named)
"""


@pytest.mark.e2e
def test_a_long_error_ends_the_run_as_the_users_mistake(tmp_path: Path) -> None:
    """Before, name and text raised in the handler: no last words came, and the heirs died of it too."""
    size = ["--stages", "2", "--microbatches", "4", "--steps", "30", "--audit", "0", "--no-check-pure"]
    command = ["run", "--model", "broken:model", "--data", "synthetic", *size, "--redundancy", "lazy"]
    launcher = Launcher(tmp_path / "run", command, {}, files={"broken.py": MODEL})
    done = launcher.wait(60)
    assert done.code == 3, done.stderr
    told = launcher.events("raised")
    assert len(told) >= 1 and all(each["place"].startswith(f"layer 1 ({CJK}") for each in told)
    assert all(each["error"].endswith("the log of the worker has them)") for each in told)
    log = launcher.run_folder / "logs" / f"worker-{told[0]['of']}.log"
    assert CJK * 14_000 in log.read_text(encoding="utf-8")

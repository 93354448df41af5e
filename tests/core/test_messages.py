"""Control messages: every kind comes back as it was sent, and one that is not as its class says is refused by name."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass
from importlib import import_module
from random import Random
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from engine.codec import values
from engine.codec.messages import decode, encode, prepare_to_decode
from engine.core.errors import InvariantError
from engine.core.message_kinds import MAX_BYTES, Message, ToAgent, ToWorker, head_of, kinds, message
from engine.core.messages import CommitMessage, EpochMessage, GoMessage, HeartbeatMessage, InflictMessage
from engine.core.ownership import Members
from engine.core.program.ballot import SlotVote, VoteMessage
from engine.core.program.inventory import Inventory, PlanMessage, PlanPartMessage, ValueRuns, to_json
from engine.core.value import Kind, Value
from tests.looped import looped
from tests.test_house import MODULES

for module in MODULES:
    if "\n@message\n" in module.text:
        import_module(module.name)
KINDS = sorted((kind, made) for kind, made in kinds().items() if made.__module__.startswith("engine."))


@message
class Everything(ToAgent):
    """A message with a field of each form that a field may have."""

    number: int
    text: str
    is_so: bool
    real: float
    maybe: int | None
    choice: Literal["one", "other"]
    many: tuple[int, ...]
    pair: tuple[int, str]
    nested: tuple[tuple[int, tuple[str, ...]], ...]
    inner: CommitMessage | None
    named: Mapping[str, str | int]
    plain: Mapping[str, Any]


WHOLE = Everything(
    1,
    "a",
    True,
    0.5,
    None,
    "one",
    (1, 2),
    (1, "b"),
    ((1, ("c",)),),
    CommitMessage(1, 1.0, "end"),
    {"a": 1},
    {"b": [None]},
)


SCALARS: dict[Any, tuple[Any, ...]] = {
    int: (0, -1, 2**62),
    str: ("", "two words", "\u00e9\n"),
    bool: (True, False),
    float: (0.1 + 0.2, -0.0, float("inf")),
    NoneType: (None,),
    Any: ([], {"a": [1]}, "text", None),
}


def value_of(hint: Any, draw: Random) -> Any:
    """Returns some value of the annotation of a field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return made_of(hint, draw)
    if hint in SCALARS or origin is Literal:
        return draw.choice(SCALARS.get(hint, arguments))
    if origin is UnionType:
        return value_of(draw.choice(arguments), draw)
    many = range(draw.randrange(3))
    if origin is tuple:
        each = [arguments[0] for _ in many] if arguments[-1] is ... else arguments
        return tuple(value_of(one, draw) for one in each)
    assert origin is Mapping, f"no values are known for {hint}"
    return {str(name): value_of(arguments[1], draw) for name in many}


def made_of(made: Any, draw: Random) -> Any:
    """Returns a data class with some value in each field."""
    return made(**{name: value_of(hint, draw) for name, hint in get_type_hints(made).items()})


@looped(("kind", "made"), KINDS)
def test_every_kind_comes_back_as_it_was_sent(kind: str, made: type[Message]) -> None:
    draw = Random(0)  # noqa: S311
    for _ in range(30):
        sent = made_of(made, draw)
        travels = encode(sent)
        assert json.loads(travels)["kind"] == kind == made.__name__.removesuffix("Message").lower()
        assert decode(travels) == sent


def test_every_kind_says_by_whom_and_when_it_is_sent() -> None:
    written_by_dataclass = [kind for kind, made in KINDS if str(made.__doc__).startswith(made.__name__ + "(")]
    assert written_by_dataclass == []


def test_floats_keep_their_bits() -> None:
    values = (0.1 + 0.2, 5e-324, 1.7976931348623157e308, float("inf"), -0.0)
    found = decode(encode(VoteMessage(0, 0, (SlotVote(0, 0, (), values, math.nan),))))
    assert isinstance(found, VoteMessage)
    (slot,) = found.slots
    assert slot.loss is not None
    assert [each.hex() for each in slot.squared_norms] == [each.hex() for each in values]
    assert math.isnan(slot.loss)


def test_a_message_inside_another_comes_back_as_its_class() -> None:
    told = EpochMessage(
        2, Members.of((0, 1)), False, True, CommitMessage(1, 0.5, "epoch"), "digest", GoMessage(False, True)
    )
    assert decode(encode(told)) == told


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        HeartbeatMessage(1, 2, 3, True).step = 4  # type: ignore[misc]


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(InvariantError, match="no message is of the kind 'gossip'"):
        decode(b'{"kind":"gossip"}')
    with pytest.raises(InvariantError, match="no message is of the kind None"):
        decode(b"{}")


@pytest.mark.parametrize("data", [b"", b"[1]", b'"ping"', b"{", b"\xff"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(InvariantError, match="these bytes are not a message"):
        decode(data)


@looped("name", [each.name for each in fields(Everything)])
def test_a_missing_field_is_named(name: str) -> None:
    found = json.loads(encode(WHOLE))
    del found[name]
    with pytest.raises(InvariantError, match=f"a message 'everything' lacks its field '{name}'"):
        decode(json.dumps(found).encode())


def test_a_field_that_the_class_does_not_have_is_named() -> None:
    with pytest.raises(InvariantError, match="a message 'ping' has no field 'loudly'"):
        decode(b'{"kind":"ping","loudly":true}')


WRONG = [
    ("number", True),
    ("number", 1.0),
    ("text", None),
    ("is_so", 1),
    ("real", "0.5"),
    ("maybe", "1"),
    ("choice", "neither"),
    ("choice", None),
    ("many", 1),
    ("many", [1, "2"]),
    ("pair", [1]),
    ("pair", ["b", 1]),
    ("nested", [[1, "c"]]),
    ("inner", 5),
    ("named", []),
    ("named", {"a": None}),
    ("plain", "b"),
]


@looped(("name", "value"), WRONG)
def test_a_field_of_a_wrong_type_is_named(name: str, value: object) -> None:
    found = json.loads(encode(WHOLE)) | {name: value}
    with pytest.raises(InvariantError, match=f"the field '{name}' of a message 'everything' is not .*: "):
        decode(json.dumps(found).encode())


def test_a_wrong_field_of_a_message_inside_another_is_named() -> None:
    found = json.loads(encode(WHOLE))
    del found["inner"]["step"]
    with pytest.raises(InvariantError, match=r"the field 'inner' of a message 'everything' .* missing .*`step`"):
        decode(json.dumps(found).encode())


def test_all_forms_come_back() -> None:
    assert decode(encode(WHOLE)) == WHOLE


def test_a_number_without_a_fraction_is_a_float_too() -> None:
    found = decode(b'{"kind":"commit","step":1,"clip_factor":1,"then":"end","keep":true,"lr":-1,"monitored":[]}')
    assert found == CommitMessage(1, 1.0, "end", keep=True)


def test_a_slot_is_a_pair_again() -> None:
    assert decode(encode(InflictMessage("f", "kill", {"code": 3, "hard": True}, (0, 1)))) == InflictMessage(
        "f", "kill", {"code": 3, "hard": True}, (0, 1)
    )


def test_two_classes_of_one_name_are_refused() -> None:
    class HeartbeatMessage(Message):
        """Has the name of another."""

    with pytest.raises(InvariantError, match="two kinds of message are called 'heartbeat'"):
        message(HeartbeatMessage)


def test_an_annotation_that_no_reader_knows_is_refused() -> None:
    @message
    class Strange(Message):
        """Has a field that JSON cannot hold."""

        field: complex

    with pytest.raises(InvariantError, match="the field 'field' of a message 'strange' is not right"):
        decode(b'{"kind":"strange","field":[]}')


def test_modules_that_define_messages_are_all_looked_at() -> None:
    modules = {each.name for each in MODULES if "\n@message\n" in each.text}
    assert {made.__module__ for _, made in KINDS} == modules


# Long messages
LONG = EpochMessage(3, Members(()), True, True, None, None, None, hosts=tuple(range(60_000)))


def test_a_long_message_is_compressed_behind_its_kind() -> None:
    data = encode(LONG)
    assert len(data) <= MAX_BYTES < 5 * len(LONG.hosts)
    assert data.startswith(head_of(EpochMessage))
    assert decode(data) == LONG


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-9], "is cut"),
        (lambda data: data + b"x", "is cut"),
        (lambda data: data[:40] + b"?" + data[41:], "is broken"),
        (lambda data: data.replace(b'"epoch"', b'"plan"', 1), "plan"),
    ],
)
def test_a_spoiled_compressed_message_is_refused(spoil: Callable[[bytes], bytes], why: str) -> None:
    with pytest.raises(InvariantError, match=why):
        decode(spoil(encode(LONG)))


def test_a_small_packet_cannot_fill_the_memory() -> None:
    bomb = head_of(EpochMessage) + b"\0" + zlib.compress(b" " * 20_000_000)
    assert len(bomb) < MAX_BYTES
    with pytest.raises(InvariantError, match="more than 16000000 bytes"):
        decode(bomb)


def test_the_plan_of_a_thousand_workers_fits_a_message() -> None:
    owners = tuple(range(1024))
    texts = tuple((worker, _inventory(worker)) for worker in owners)
    plan = PlanMessage(2, 0, owners, (), owners, tuple((worker,) for worker in owners), texts, owners, owners, owners)
    data = encode(plan)
    assert len(data) < MAX_BYTES < sum(len(text) for _, text in texts)
    assert decode(data) == plan


def _inventory(worker: int) -> str:
    slot = (0, worker)
    values = [Value(kind, *slot, index) for kind in (Kind.ACTIVATION, Kind.RESIDUAL) for index in range(worker % 64)]
    counts = {slot: 60 + worker % 7}
    return to_json(Inventory(worker, 1, (slot, (0, worker + 1)), counts, counts, (), ValueRuns(values)))


def test_the_first_message_of_each_kind_finds_its_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_DECODERS", {})
    prepare_to_decode(ToWorker)
    made = {kind for kind in kinds().values() if issubclass(kind, ToWorker)}
    assert set(values._DECODERS) == made
    assert {EpochMessage, PlanPartMessage, GoMessage} <= made, "those of a failure"

"""What the next host that coordinates hears again of the checkpoints: no worker writes a part a second time."""

from __future__ import annotations

from engine.codec.messages import encode
from engine.core.checkpoint_rules import KeptMessage, UnkeptMessage
from engine.core.manifest import Part
from engine.core.messages import (
    BorderMessage,
    BordersMessage,
    PartitionMessage,
    PingMessage,
    ReadyMessage,
    WelcomeMessage,
)
from engine.runtime.agent.host_servers import ReplayBuffer, WelcomeCache


def kept(step: int, layer: int) -> bytes:
    return encode(KeptMessage(step, Part(layer, 0, 1, f"{step}-{layer}", 1, "00"), 0, 0, 0))


def test_the_parts_of_the_last_checkpoint_are_said_again() -> None:
    said = ReplayBuffer()
    for step in range(3):
        for layer in range(100):
            said.add(kept(step, layer))
    said.add(kept(1, 100))  # late
    said.add(encode(BorderMessage(0, (), ())))
    said.add(encode(ReadyMessage()))
    said.add(encode(UnkeptMessage(2, "no room")))
    assert said.packets[:2] == [encode(BorderMessage(0, (), ())), encode(ReadyMessage())]
    assert said.packets[2:] == [*(kept(2, layer) for layer in range(100)), encode(UnkeptMessage(2, "no room"))]


def welcome(worker: int, start: str) -> bytes:
    return encode(WelcomeMessage(worker, {}, (0, 1), ((), ()), (0, 1), 2, (), start=start))


def test_what_a_newcomer_is_told_is_passed_on_and_nothing_of_an_earlier_start() -> None:
    border, cut = (
        encode(BordersMessage(((((1,), "float32", True),),))),
        [encode(PartitionMessage(starts)) for starts in ((0, 1), (0, 2))],
    )
    taught = WelcomeCache()
    for packet in (welcome(0, "ab"), welcome(1, "ab"), cut[0], cut[0], encode(PingMessage()), border):
        taught.add(packet)
    assert taught.packets == [welcome(0, "ab"), welcome(1, "ab"), cut[0], border]
    for packet in (welcome(0, "cd"), cut[1]):  # all workers begin again
        taught.add(packet)
    assert taught.packets == [welcome(0, "cd"), cut[1]]

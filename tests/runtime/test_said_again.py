"""What the next host that coordinates hears again of the checkpoints: no worker writes a part a second time."""

from __future__ import annotations

from engine.core.checkpoints.manifest import Part
from engine.core.checkpoints.part_messages import KeptMessage, UnkeptMessage
from engine.core.message_codec import encode
from engine.core.messages import ReadyMessage
from engine.runtime.hosts.said_again import SaidAgain


def kept(step: int, layer: int) -> bytes:
    return encode(KeptMessage(step, Part(layer, 0, 1, f"{step}-{layer}", 1, "00"), 0, 0, 0))


def test_the_parts_of_the_last_checkpoint_are_said_again() -> None:
    said = SaidAgain()
    for step in range(3):
        for layer in range(100):
            said.add(kept(step, layer))
    said.add(kept(1, 100))  # late
    said.add(encode(ReadyMessage()))
    said.add(encode(UnkeptMessage(2, "no room")))
    assert said.packets[0] == encode(ReadyMessage())
    assert said.packets[1:] == [*(kept(2, layer) for layer in range(100)), encode(UnkeptMessage(2, "no room"))]

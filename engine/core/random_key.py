"""Keys for random numbers: every draw is named by what it is for, so that any worker can repeat it.

No rule of the program may draw from a process-wide stream: a redone forward would shift it.
"""

from __future__ import annotations

import hashlib


def random_key(seed: int, *parts: int | str) -> int:
    """Returns a 63-bit key: the first 8 bytes, big endian, of BLAKE2b over ``seed/part/part...``, top bit cleared."""
    text = "/".join(str(part) for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def layer_key(seed: int, step: int, pipeline: int, layer: int, microbatch: int) -> int:
    """Returns the key that seeds everything random inside one layer's forward (dropout)."""
    return random_key(seed, "layer", step, pipeline, layer, microbatch)


def weights_key(seed: int, layer: int) -> int:
    """Returns the key that seeds the initial weights of one layer, the same in every pipeline."""
    return random_key(seed, "weights", layer)

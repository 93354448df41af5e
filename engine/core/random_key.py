"""Keys for random numbers: the purpose of a draw names its key, so that any worker can repeat the draw.

No code may draw from a process-wide stream: a forward that is run again would shift that stream.
"""

from __future__ import annotations

import hashlib


def random_key(seed: int, *parts: int | str) -> int:
    """Returns a 63-bit key: the first 8 bytes, big endian, of BLAKE2b over ``seed/part/part...``, top bit cleared."""
    text = "/".join(map(str, (seed, *parts)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def layer_key(seed: int, step: int, pipeline: int, layer: int, microbatch: int) -> int:
    """Returns the key that seeds all randomness inside one layer's forward (dropout)."""
    return random_key(seed, "layer", step, pipeline, layer, microbatch)


def weights_key(seed: int, layer: int) -> int:
    """Returns the key that seeds the initial weights of one layer, the same in every pipeline."""
    return random_key(seed, "weights", layer)

"""A permutation of 0 .. size - 1 by key, which needs no list: one number at a time.

A balanced Feistel network permutes the numbers of an even count of bits. A result beyond `size` is permuted again until
it is below ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, section 3); less
than four times on average, because the network has less than four times `size` numbers.
"""

from __future__ import annotations

from engine.core.errors import ensure
from engine.core.random_key import random_key

_ROUNDS = 6  # of four rounds, a small network shows its structure


def permuted(position: int, size: int, key: int) -> int:
    """Returns the number at a position of the permutation of 0 .. size - 1 that `key` names."""
    ensure(0 <= position < size, f"position {position} of a permutation of {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    number = _network(position, half, key)
    while number >= size:
        number = _network(number, half, key)
    return number


def _network(number: int, half: int, key: int) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (random_key(key, turn, right) & mask)
    return left << half | right

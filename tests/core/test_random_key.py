"""Keys for random numbers: fixed for ever, spread out, and different for whatever differs."""

from __future__ import annotations

import hashlib
import itertools

from engine.core.random_key import layer_key, random_key, weights_key


def test_a_key_is_the_blake2b_of_its_parts() -> None:
    digest = hashlib.blake2b(b"7/data/3/0/2", digest_size=8).digest()
    assert random_key(7, "data", 3, 0, 2) == int.from_bytes(digest, "big") >> 1


def test_keys_are_these_so_that_old_runs_stay_comparable() -> None:
    assert random_key(0) == 4761921975702974394
    assert layer_key(0, step=1, pipeline=2, layer=3, microbatch=4) == 9085865838089871347
    assert weights_key(1, layer=2) == 2598544448028598908


def test_whatever_differs_has_another_key() -> None:
    keys = [layer_key(*parts) for parts in itertools.product(range(2), range(4), range(3), range(12), range(8))]
    keys += [weights_key(seed, layer) for seed in range(2) for layer in range(120)]
    assert len(set(keys)) == len(keys)
    assert random_key(1, 11) != random_key(11, 1)
    assert random_key(1, 1, 11) != random_key(1, 11, 1)


def test_keys_are_63_bits_and_use_them_all() -> None:
    keys = [random_key(0, number) for number in range(2000)]
    assert all(0 <= key < 2**63 for key in keys)
    for bit in range(63):
        assert 800 < sum(key >> bit & 1 for key in keys) < 1200

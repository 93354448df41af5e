"""Keys under a root: a near key is bamboo's, relative text; a far key is etcd's, absolute bytes.

Rule: every key that is sent to etcd comes from here, so that nothing outside of the root is read or changed.
"""

from __future__ import annotations

from engine.core.errors import ensure


class KeySpace:
    """The keys under one root. A foreign key that is not UTF-8 is converted there and back without loss."""

    def __init__(self, root: str):
        self._root = root.encode()
        self._end = _after(self._root)

    def far(self, key: str) -> bytes:
        """Returns the absolute form of a key."""
        ensure(bool(key), "a key is not empty")
        return self._root + key.encode("utf-8", "surrogateescape")

    def near(self, key: bytes) -> str:
        """Returns the relative form of a key."""
        ensure(key.startswith(self._root), f"{key!r} is not under {self._root!r}")
        return key[len(self._root) :].decode("utf-8", "surrogateescape")

    def far_range(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns the range of absolute keys with `prefix`: the first, and the end (exclusive)."""
        start = self._root + prefix.encode("utf-8", "surrogateescape")
        end = _after(start)
        ensure(self._root <= start < end <= self._end, f"{prefix!r} leaves {self._root!r}")
        return start, end


def _after(prefix: bytes) -> bytes:
    """Returns the least key that is greater than all keys with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])

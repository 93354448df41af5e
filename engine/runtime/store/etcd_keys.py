"""Keys under a root: near ones are bamboo's, relative and text; far ones are etcd's, absolute and bytes.

Rule: whatever goes to etcd comes from here, so nothing outside of the root can be read or changed.
"""

from __future__ import annotations


class KeySpace:
    """The keys under one root. One that somebody else has put there need not be UTF-8; it comes and goes unharmed."""

    def __init__(self, root: str):
        self._root = root.encode()
        self._end = _after(self._root)

    def far(self, key: str) -> bytes:
        """Returns the absolute key."""
        assert key, "a key is not empty"
        return self._root + key.encode("utf-8", "surrogateescape")

    def near(self, key: bytes) -> str:
        """Returns the relative key."""
        assert key.startswith(self._root), f"{key!r} is not under {self._root!r}"
        return key[len(self._root) :].decode("utf-8", "surrogateescape")

    def far_range(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns the first absolute key of `prefix` and the first after it."""
        start = self._root + prefix.encode("utf-8", "surrogateescape")
        end = _after(start)
        assert self._root <= start < end <= self._end, f"{prefix!r} leaves {self._root!r}"
        return start, end


def _after(prefix: bytes) -> bytes:
    """Returns the first key that is greater than all that start with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])

"""The text of a place for checkpoints: a folder, a URL, or neither."""

from __future__ import annotations

from pathlib import Path

from engine.files.checkpoint_storage import folder_at, is_half_url, is_url
from tests.looped import looped


@looped(
    ("text", "folder"),
    [
        ("kept", "kept"),
        ("./a:b", "./a:b"),
        ("/data/a:b", "/data/a:b"),
        ("/data/a://b", "/data/a://b"),
        ("a%20b", "a%20b"),
        ("file:///data/a%20b", "/data/a b"),
        ("FILE:///data", "/data"),
        ("s3://bucket/kept", None),
        ("S3://bucket/kept", None),
        ("simplecache::s3://bucket/kept", None),
    ],
)
def test_a_place_is_a_folder_or_a_url(text: str, folder: str | None) -> None:
    assert folder_at(text) == (None if folder is None else Path(folder))
    assert not is_half_url(text)
    assert is_url(text) == (folder is None or text.lower().startswith("file:"))


@looped("text", ["file:relative", "file:/data", "FILE://host/data", "file://", "a:b", "s3:/bucket", "s3://", "://x"])
def test_what_only_looks_like_a_url_is_neither(text: str) -> None:
    assert is_half_url(text)

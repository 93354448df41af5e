"""Manifests of checkpoints as the bytes of their files, and back; `engine/core/manifest.py` has their rules."""

from __future__ import annotations

from typing import NoReturn

from engine.codec.values import parsed, plain_of, text_of, value_of
from engine.core.errors import InvariantError, ensure
from engine.core.manifest import (
    FORMAT,
    MOST_BYTES,
    MOST_INNER,
    DamagedCheckpointError,
    Manifest,
    can_be_parsed,
    manifest_file,
    manifest_problems,
)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Returns the bytes of a manifest, always the same for the same values.

    Raises:
        InvariantError: it is not whole: a layer or a shard is missing, or a value has not the form.
    """
    for problem in manifest_problems(manifest):
        raise InvariantError(f"no manifest: {problem}")
    data = _text(manifest)
    ensure(can_be_parsed(data), "no manifest: no reader would take one as large")
    return data


def _text(manifest: Manifest) -> bytes:
    plain = plain_of(manifest)
    parts = [{name: value for name, value in part.items() if name != "position" or value} for part in plain["parts"]]
    whole = {name: value for name, value in plain.items() if name != "monitors" or value is not None}
    return f"{text_of(whole | {'parts': parts}, sort_keys=True)}\n".encode()


def manifest_of(name: str, data: bytes) -> Manifest:
    """Returns the manifest that `data` is, which was read from ``FOLDER/FILE``, its name.

    Raises:
        DamagedCheckpointError: it is no whole manifest, or belongs to another name.
    """
    folder, _, file = name.rpartition("/")

    def refuse(why: str) -> NoReturn:
        raise DamagedCheckpointError(f"{name}: {why}")

    if manifest_file(data) != file:
        refuse(f"its SHA-256 begins with {manifest_file(data)[9:25]}, not with the digits in its name")
    if not can_be_parsed(data):
        refuse(f"expected at most {MOST_BYTES} bytes, with at most {MOST_INNER} objects and lists in them")
    try:
        plain = parsed(data)
    except (ValueError, RecursionError):
        refuse("expected one object of JSON")
    if type(plain) is not dict or plain.get("format") != FORMAT:
        version = plain.get("format") if type(plain) is dict else plain
        refuse(f"the field 'format': expected {FORMAT}, found {version!r:.80}; another bamboo wrote it")
    parts = plain.get("parts")
    for part in parts if type(parts) is list else ():
        if type(part) is dict:
            part.setdefault("position", "")  # the text has it only where there is one
    plain.setdefault("monitors", None)
    try:
        manifest = value_of(plain, Manifest, "a manifest")
    except InvariantError as error:
        refuse(str(error))
    for problem in manifest_problems(manifest):
        refuse(problem)
    if _text(manifest) != data:
        refuse("expected the canonical text of its values")
    if folder.rpartition("/")[2] != manifest.folder:
        refuse(f"it is a manifest of step {manifest.step}, which belongs into {manifest.folder}")
    return manifest

"""The text of a place for checkpoints: a folder, or a URL.

Rule: a text that begins with a scheme and a colon is a URL, in any case of letters, and must be ``SCHEME://PLACE``. Any
other text is a folder; one that looks like a URL has a ``./`` in front. ``file:///PATH`` is a folder too, with ``%20``
and its like decoded.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

_SCHEME = "[a-z][a-z0-9+.-]*"
_URL = re.compile(f"({_SCHEME}::)*{_SCHEME}://", re.IGNORECASE)  # fsspec chains file systems with ::
_FILE = re.compile("file://(?=/)", re.IGNORECASE)
_LIKE_URL = re.compile(f"{_SCHEME}:|://", re.IGNORECASE)
_NO_PLACE = re.compile("file://(?!/)|[^/]*://$", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Returns whether a text is a URL, of an object store or of a folder."""
    return _URL.match(text) is not None


def is_half_url(text: str) -> bool:
    """Returns whether a text is neither a folder nor a whole URL."""
    return bool(_NO_PLACE.match(text) or (_LIKE_URL.match(text) and not is_url(text)))


def folder_at(place: str | Path) -> Path | None:
    """Returns the folder of this machine that a place is; None for the URL of an object store."""
    text = str(place)
    if file := _FILE.match(text):
        return Path(unquote(text[file.end() :]))
    return None if is_url(text) else Path(text)

"""Files that are there whole or not at all: written aside, then moved into place."""

from __future__ import annotations

import os
from pathlib import Path


class NotAFileError(ValueError):
    """Something stands at the path that no file may take the place of."""


def require_file_place(path: Path) -> None:
    """Refuse a path at which something other than a file stands: a folder, a device, a pipe, or a link to one.

    Moving a file into place would put it in the stead of whatever is there, and root may do that even to a device.

    Raises:
        NotAFileError: naming the path and what is there.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device, a pipe or a socket"
        raise NotAFileError(f"{str(path)!r} is {kind}, which no file is put in place of: name a file")


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, making its folder; a killed process leaves the old file or none.

    Raises:
        NotAFileError: something other than a file stands there; it is left as it is.
    """
    require_file_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)

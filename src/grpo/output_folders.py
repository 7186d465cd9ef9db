"""Where results go: found fit to be written before the work that makes them, not after it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile


def require_writable(folder: Path, key: str) -> None:
    """Refuse a folder that nothing could be written into; nothing is made to find that out.

    Args:
        folder: where something will be written; it need not be there yet.
        key: the setting that names it.

    Raises:
        ValueError: naming the setting, the folder and what stands in the way.
    """
    # Of the folders above, the nearest that is there: the missing ones between will be made in it.
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise ValueError(f"{key} is {folder}, but {nearest} is not a folder: choose another one, or move that away")
    try:
        with TemporaryFile(dir=nearest):  # permission bits alone say nothing of a read-only disk, or to root
            pass
    except OSError as error:
        raise ValueError(
            f"{key} is {folder}, and {nearest} cannot be written to ({error.strerror}): choose another folder, "
            "or make this one writable"
        ) from error

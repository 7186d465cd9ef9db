"""Where results go: found fit to be written before the work that makes them, not after it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from grpo.whole_files import NotAFileError, require_file_place


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


def require_output_file(path: Path, key: str, read: Path) -> None:
    """Refuse a file that could not be written, or that would be written over what is read.

    Args:
        path: the file; it and its folder need not be there yet.
        key: the setting that names it.
        read: the file that is read, which must be another one, by whatever name or link.

    Raises:
        ValueError: naming the setting, the file and what stands in the way.
    """
    try:
        require_file_place(path)
        if path.exists() and read.exists() and path.samefile(read):
            raise ValueError(f"{key} is {str(path)!r}, the file that is read ({read}): name another one")
    except NotAFileError as error:
        raise ValueError(f"{key}: {error}") from error
    except OSError as error:  # a folder that may not be looked into, a ring of links, a name that is too long
        raise ValueError(
            f"{key} is {str(path)!r}, which cannot be used ({error.strerror}): name another file"
        ) from error
    require_writable(path.parent, key)

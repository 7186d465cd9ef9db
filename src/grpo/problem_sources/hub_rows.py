"""Rows of Hugging Face data sets, from the hub at a pinned revision or from a folder on this machine.

Both need the ``datasets`` package, which is not installed by default and is imported only when rows are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo.problem_files import ProblemFileError
from grpo.problem_sources.raw_rows import RawRow

# What `save_to_disk` leaves in a folder: of one split, and of several.
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class HubRows:
    """A split of a data set of the hub."""

    name: str
    """Such as ``openai/gsm8k``."""
    revision: str
    """The commit's 40 hexadecimal digits; a branch or a tag may come to mean something else."""
    split: str
    """The data set's own name of it, such as ``train``."""
    config: str | None = None
    """The data set's configuration, where it has several, such as ``main``."""

    def __post_init__(self) -> None:
        if len(self.revision) != 40 or set(self.revision) - set("0123456789abcdef"):
            raise ValueError(
                f"rows.revision is {self.revision!r}: give the commit's 40 hexadecimal digits, "
                "a branch or a tag may move"
            )

    def read(self) -> Iterator[RawRow]:
        """The rows in the data set's order.

        Raises:
            ProblemFileError: ``datasets`` is not installed, or does not find the data set.
        """
        place = f"{self.name}@{self.revision[:7]} {self.split}"
        try:
            data = _datasets().load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except (OSError, ValueError) as error:
            raise ProblemFileError(
                f"{place}: cannot be loaded ({type(error).__name__}: {str(error)[:300]}): check name, config and "
                "split; a first download needs HF_HUB_OFFLINE=0"
            ) from error
        return _rows(data, place)


@dataclass(frozen=True)
class SavedRows:
    """A data set in a folder: written by ``save_to_disk``, or files that ``load_dataset`` reads."""

    folder: Path
    """The folder."""
    split: str = "train"
    """The data set's own name of the split; a folder that holds one split alone is read whatever stands here."""

    def read(self) -> Iterator[RawRow]:
        """The rows in the data set's order.

        Raises:
            ProblemFileError: ``datasets`` is not installed, or does not find the split in the folder.
        """
        if not self.folder.is_dir():
            raise ProblemFileError(f"{self.folder}: no such folder: check the path, or fetch the data with `dvc pull`")
        try:
            data = self._load(_datasets())
        except (OSError, ValueError, KeyError) as error:
            raise ProblemFileError(
                f"{self.folder}: split {self.split!r} cannot be loaded ({type(error).__name__}: {str(error)[:300]}): "
                "give the folder of a saved data set and one of its splits"
            ) from error
        return _rows(data, f"{self.folder} {self.split}")

    def _load(self, datasets: Any) -> Any:
        if (self.folder / _SAVED).is_file():
            return datasets.load_from_disk(str(self.folder))
        if (self.folder / _SAVED_SPLITS).is_file():
            return datasets.load_from_disk(str(self.folder))[self.split]
        return datasets.load_dataset(str(self.folder), split=self.split)


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ModuleNotFoundError as error:
        raise ProblemFileError(
            "rows of a Hugging Face data set need the package datasets, which is not installed: run "
            "`pip install 'grpo[datasets]'`, or give a .jsonl or .parquet file"
        ) from error


def _rows(data: Any, place: str) -> Iterator[RawRow]:
    for number, fields in enumerate(data, start=1):
        yield RawRow(f"{place}: row {number}", fields)

"""Reading what the stages wrote: a damaged file is an error that names it and the stage to run again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import yaml


class ReportError(ValueError):
    """The report cannot be made from what is there."""


def refuse_damaged(path: Path, stage: str, why: object) -> NoReturn:
    """Raise for a file that cannot be used.

    Raises:
        ReportError: always.
    """
    raise ReportError(f"{path} cannot be used ({why}): run the stage {stage} again")


def refuse_missing(stage_of: Mapping[Path, str]) -> None:
    """Refuse where a file or folder is not there; ``stage_of`` says what makes each.

    Raises:
        ReportError: naming all that is missing.
    """
    missing = [f"{path} (stage {stage})" for path, stage in stage_of.items() if not path.exists()]
    if missing:
        raise ReportError(f"the report lacks {', '.join(missing)}: run the stages named, or `dvc repro report`")


def read_text(path: Path, stage: str) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse_damaged(path, stage, error)


def read_json(path: Path, stage: str, needed: Iterable[str]) -> Mapping[str, Any]:
    """The named fields of a JSON file, those ``needed`` among them."""
    return parse_json(path, stage, read_text(path, stage), needed)


def parse_json(path: Path, stage: str, text: str, needed: Iterable[str]) -> Mapping[str, Any]:
    """The named fields of a JSON object that stands in the file at ``path``, those ``needed`` among them."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse_damaged(path, stage, error)
    return _fields(path, stage, parsed, needed)


def read_yaml(path: Path, stage: str, needed: Iterable[str]) -> Mapping[str, Any]:
    """The named fields of a YAML file, those ``needed`` among them."""
    text = read_text(path, stage)
    try:
        parsed = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        refuse_damaged(path, stage, str(error).partition("\n")[0])
    return _fields(path, stage, parsed, needed)


def read_rows(path: Path, stage: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    try:
        table = pq.read_table(path, columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        refuse_damaged(path, stage, str(error).partition("\n")[0])
    lacking = [name for name in columns if name not in table.column_names]  # read_table leaves them out silently
    if lacking:
        refuse_damaged(path, stage, f"it has no column {', '.join(lacking)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def read_folder(folder: Path, stage: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of all Parquet files of a folder, in the order of their names."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ReportError(f"{folder} holds no table: run the stage {stage} again")
    return [row for file in files for row in read_rows(file, stage, columns)]


def _fields(path: Path, stage: str, parsed: object, needed: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(parsed, dict):
        refuse_damaged(path, stage, "it does not hold named fields")
    lacking = [name for name in needed if name not in parsed]
    if lacking:
        refuse_damaged(path, stage, f"it lacks {', '.join(lacking)}")
    return parsed

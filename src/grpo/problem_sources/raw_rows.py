"""Rows as a file holds them, before any layout reads them: JSON lines, Parquet, or a folder of JSON files.

A name that ends in ``.gz`` is unpacked on the way. ``place`` says where a row stands, for every later error.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.problem_files import ProblemFileError


@dataclass(frozen=True)
class RawRow:
    """One row: its fields by their published names, and where it stands."""

    place: str
    fields: Mapping[str, Any]


class RowReader(Protocol):
    """Where rows come from that are no file."""

    def read(self) -> Iterator[RawRow]:
        """The rows, in the same order each time."""
        ...


def read_rows(rows: Path | RowReader) -> Iterator[RawRow]:
    """The rows of a reader, a file, or the ``*.json`` files below a folder in the order of their names.

    Raises:
        ProblemFileError: nothing there, a kind of file that is not known, or one that cannot be read; its
            message names file and line.
    """
    if not isinstance(rows, Path):
        return rows.read()
    if rows.is_dir():
        return _json_files(rows)
    kind = Path(rows.name.removesuffix(".gz")).suffix
    if kind in (".jsonl", ".ndjson"):
        return (RawRow(place, json_object(line, place)) for place, line in numbered_lines(rows))
    if kind in (".parquet", ".pq"):
        return _parquet_rows(rows)
    raise ProblemFileError(
        f"{rows}: a file of this kind is not read: give .jsonl or .parquet (or either with .gz), or a folder of .json"
    )


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of a text file with its place, ``file:number``.

    Raises:
        ProblemFileError: no such file, not UTF-8, or nothing in it.
    """
    try:
        text = file_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{path}: not UTF-8 ({error}): save it in UTF-8") from error
    if not text:
        raise ProblemFileError(f"{path}: the file is empty: write at least one row into it")
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        yield f"{path}:{number}", line


def file_bytes(path: Path) -> bytes:
    """The content of a file, unpacked where its name ends in ``.gz``."""
    if not path.is_file():
        raise ProblemFileError(f"{path}: no such file: check the path, or fetch the data with `dvc pull`")
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemFileError(f"{path}: not a whole gzip file ({error}): fetch it again") from error


def json_object(text: str, place: str) -> dict[str, Any]:
    """The JSON object that ``text`` is.

    Raises:
        ProblemFileError: blank, no JSON, no object, a key twice, or a number that JSON cannot write.
    """
    if not text.strip():
        raise ProblemFileError(f"{place}: the line is blank: remove it")
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise ProblemFileError(f"{place}: not JSON ({error}): write one JSON object") from error
    if not isinstance(row, dict):
        raise ProblemFileError(f"{place}: a {type(row).__name__}, not an object: write {{...}} with named fields")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return row


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text} is not JSON")


def _json_files(folder: Path) -> Iterator[RawRow]:
    files = sorted(folder.rglob("*.json"), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise ProblemFileError(f"{folder}: no .json file below this folder: check the path")
    for path in files:
        text = "\n".join(line for _, line in numbered_lines(path))
        yield RawRow(str(path), json_object(text, str(path)))


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    try:
        file = pq.ParquetFile(BytesIO(file_bytes(path)))
        number = 0
        for batch in file.iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield RawRow(f"{path}: row {number}", fields)
    except pa.ArrowException as error:
        raise ProblemFileError(f"{path}: not a Parquet file that can be read ({error}): fetch it again") from error
    if not number:
        raise ProblemFileError(f"{path}: the file has no rows: write at least one into it")

"""What all layouts share: rows from anywhere in, checked problems with role and split out."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from grpo.problem_files import ProblemFileError, normalised, parse_problem
from grpo.problem_sources.raw_rows import RawRow, RowReader, read_rows
from grpo.records import Problem

Role = Literal["train", "heldout_only"]
GivenSplit = Literal["train", "validation", "heldout"]


@dataclass(frozen=True)
class SourceRow:
    """A problem, where it was read, and the split its source gives it; None: the keyed hash decides."""

    problem: Problem
    place: str
    split: GivenSplit | None = None


@runtime_checkable
class ProblemSource(Protocol):
    """Where problems come from."""

    def read(self) -> Iterator[SourceRow]:
        """The problems, in the same order each time."""
        ...


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """Rows of one layout. A subclass says how a row becomes a problem's fields."""

    rows: Path | RowReader
    """A .jsonl or .parquet file (also with .gz), a folder of .json files, or a reader such as HubRows."""
    role: Role = "train"
    """train: the policy trains on problems of these slices; heldout_only: never, to see what carries over."""
    split: GivenSplit | None = None
    """Where the data set gives it: heldout or validation takes all rows, train none of heldout; null: by the hash."""

    def read(self) -> Iterator[SourceRow]:
        """The checked problems.

        Raises:
            ProblemFileError: naming the place, the field and the remedy.
        """
        for row in read_rows(self.rows):
            yield SourceRow(checked_problem(row, {"role": self.role}, self.fields_of(row)), row.place, self.split)

    @abstractmethod
    def fields_of(self, row: RawRow) -> dict[str, Any]:
        """The problem's fields, as ``Problem`` names them; ``id`` is made from the question where it is missing."""


def checked_problem(row: RawRow, origin: Mapping[str, Any], fields: dict[str, Any]) -> Problem:
    """The problem, held to the same rules as a line of a plain problem file."""
    fields["metadata"] = {**origin, **fields.get("metadata", {})}
    if "id" not in fields:
        fields["id"] = content_id(fields["slice"], fields["question"])
    try:
        # Through its line, so that it is equal before and after the file.
        return parse_problem(json.dumps(fields, allow_nan=False))
    except ProblemFileError as error:
        raise ProblemFileError(f"{row.place}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ProblemFileError(
            f"{row.place}: a field of {', '.join(map(repr, row.fields))} cannot be written as JSON ({error}): "
            "leave it out, or make it text before"
        ) from error


def content_id(prefix: str, question: str) -> str:
    """An id that hangs on the question alone: the same in any order of the rows and any copy of the file."""
    return f"{prefix}-{hashlib.sha256(normalised(question).encode(errors='replace')).hexdigest()[:16]}"


def text_field(row: RawRow, *names: str) -> str:
    """The text under the first of ``names`` that the row has; dots lead into objects.

    A whole number is taken as its digits; of 18.0 nobody can say whether 18 is the same text, so it is refused.
    """
    name = next((name for name in names if has_field(row, name)), None)
    if name is None:
        raise ProblemFileError(
            f"{row.place}: field {' or '.join(map(repr, names))} is missing; the row has "
            f"{', '.join(map(repr, row.fields)) or 'none'}: choose the layout or the field names that fit"
        )
    value = field_value(row, name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ProblemFileError(f"{row.place}: field {name!r} is {value!r:.80}: make it a string")
    if not value.strip():
        raise ProblemFileError(f"{row.place}: field {name!r} is {value!r:.80}: give it some text")
    return value


def has_field(row: RawRow, name: str) -> bool:
    try:
        field_value(row, name)
    except KeyError:
        return False
    return True


def field_value(row: RawRow, name: str) -> Any:
    """What stands under ``name``, or under ``a.b`` in the object ``a``.

    Raises:
        KeyError: nothing.
    """
    if name in row.fields:
        return row.fields[name]
    value: Any = row.fields
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[part]
    return value

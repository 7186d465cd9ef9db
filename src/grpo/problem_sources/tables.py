"""Any table whose columns need no more than other names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.problem_files import ProblemFileError
from grpo.problem_sources.layout import Layout, field_value, has_field, text_field
from grpo.problem_sources.raw_rows import RawRow

Target = Literal["id", "question", "answer", "slice", "context", "role"]


@dataclass(frozen=True, kw_only=True)
class MappedProblems(Layout):
    """Problems whose fields stand under names of their own.

    A field that is neither mapped nor kept is left behind.
    """

    fields: dict[Target, str]
    """Field of the problem -> the row's field; ``a.b`` is ``b`` in the object ``a``. question and answer are needed,
    id is made from the question where it is not named."""
    slice: str | None = None
    """The slice of all rows, where ``fields`` names none."""
    keep: list[str] = field(default_factory=list)
    """Fields of the row to keep in the problem's metadata, under their own names."""

    def __post_init__(self) -> None:
        for name in ("question", "answer"):
            if name not in self.fields:
                raise ProblemFileError(f"{self.rows}: fields names no {name}: add `{name}: <the row's field>`")
        if ("slice" in self.fields) == (self.slice is not None):
            raise ProblemFileError(f"{self.rows}: say either slice or fields.slice: the subset it is reported under")
        if reserved := {"role", "code"} & set(self.keep):
            raise ProblemFileError(f"{self.rows}: keep names {min(reserved)!r}, which has a meaning of its own here")

    def fields_of(self, row: RawRow) -> dict[str, Any]:
        fields: dict[str, Any] = {target: text_field(row, name) for target, name in self.fields.items()}
        fields.setdefault("slice", self.slice)
        missing = [name for name in self.keep if not has_field(row, name)]
        if missing:
            raise ProblemFileError(f"{row.place}: field {missing[0]!r} is missing: take it out of keep")
        kept = {name: field_value(row, name) for name in self.keep}
        role = {"role": fields.pop("role")} if "role" in fields else {}
        return fields | {"metadata": kept | role}

r"""Mathematics with a worked solution that ends in its answer: GSM8K's ``####`` and MATH's ``\boxed{}``.

The answer is gold exactly as published (``1,200`` keeps its comma); the solution is kept as
``metadata.solution``, where ``grade_solutions`` of *prepare* finds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from grpo.problem_files import ProblemFileError
from grpo.problem_sources.layout import Layout, has_field, text_field
from grpo.problem_sources.raw_rows import RawRow

# With its brace, or without one and with something after it.
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|(?=[^\s{}$]))")
_END_OF_FORMULA = re.compile(r"(?<!\\)\$|\\[\])]|\\end\b")
# What is plainly one answer where no formula ends: no white space, and no sentence's end.
_ONE_WORD = re.compile(r"\S*[^\s.,;:!?]")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class GSM8K(Layout):
    """``question`` and ``answer``, a solution that ends in ``#### <the answer>`` (Cobbe et al., arXiv:2110.14168)."""

    slice: str = "gsm8k"
    """The slice of all rows, and the beginning of their ids."""

    def fields_of(self, row: RawRow) -> dict[str, Any]:
        solution = text_field(row, "answer")
        _, mark, gold = solution.rpartition("####")
        if not mark or not gold.strip() or "\n" in gold.strip():
            raise ProblemFileError(
                f"{row.place}: field 'answer' ends in {solution[-40:]!r}, not in a line `#### <the answer>`: "
                "add it, or read the file as MappedProblems"
            )
        question = text_field(row, "question")
        return {"question": question, "answer": gold.strip(), "slice": self.slice, "metadata": {"solution": solution}}


@dataclass(frozen=True, kw_only=True)
class MATH(Layout):
    r"""``problem``, ``solution`` with the answer in its last ``\boxed{}``, ``level`` and ``type`` or ``subject``
    (Hendrycks et al., arXiv:2103.03874)."""

    name: str = "math"
    """The beginning of slices and ids."""
    slice_by: Literal["type", "level", "type and level", "nothing"] = "type"
    """What makes a slice: ``math/algebra``, ``math/level 5``, ``math/algebra/level 5`` or ``math``."""

    def fields_of(self, row: RawRow) -> dict[str, Any]:
        solution = text_field(row, "solution")
        gold = last_boxed(solution)
        if gold is None:
            raise ProblemFileError(
                f"{row.place}: field 'solution' holds no whole \\boxed{{...}} with something in it: add it, "
                "or read the file as MappedProblems"
            )
        kind, level = text_field(row, "type", "subject"), text_field(row, "level")
        level = level if level.lower().startswith("level") else f"level {level}"
        metadata = {"solution": solution, "type": kind, "level": level}
        named = {"id": text_field(row, "unique_id")} if has_field(row, "unique_id") else {}
        fields = {"question": text_field(row, "problem"), "answer": gold, "metadata": metadata}
        return fields | named | {"slice": self._slice(kind.lower(), level.lower())}

    def _slice(self, kind: str, level: str) -> str:
        parts = {"type": [kind], "level": [level], "type and level": [kind, level], "nothing": []}[self.slice_by]
        return "/".join([self.name, *parts])


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` or ``\fbox{...}`` holds, as its data set's own code reads it; None without one.

    A box without a brace goes to the end of its formula. Where no formula ends after it, it must be the last word.

    Not the reward's reading of a completion, which has other concerns: where the two differ on a published
    solution, grading the solutions shows it.

    >>> last_boxed(r"$\boxed{1}$, so $\boxed{\frac{1}{2}}$"), last_boxed(r"\boxed 7"), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', '7', None)
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    if not boxes[-1][1]:
        return _unbraced(text[boxes[-1].end() :])
    depth = 1
    for brace in _BRACE.finditer(text, boxes[-1].end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[boxes[-1].end() : brace.start()].strip() or None
    return None


def _unbraced(rest: str) -> str | None:
    if end := _END_OF_FORMULA.search(rest):
        return rest[: end.start()].strip() or None
    return rest.strip() if _ONE_WORD.fullmatch(rest.strip()) else None

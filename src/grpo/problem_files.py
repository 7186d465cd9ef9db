"""Problems on disk: JSON lines in UTF-8, one problem a line, checked field by field when read.

>>> row = '{"id": "sums-1", "question": "2 + 2 =", "answer": "4", "slice": "sums"}'
>>> parse_problem(row)
Problem(id='sums-1', question='2 + 2 =', answer='4', slice='sums', metadata={}, context='')
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from grpo.records import Problem
from grpo.whole_files import write_whole

TEXT_FIELDS = ("id", "question", "answer", "slice")


class ProblemFileError(ValueError):
    """A problem file that cannot be used; the message names file and line, field and remedy."""


def normalised(text: str) -> str:
    """``text`` with case, compatible forms and runs of white space made one, without what shows nothing.

    For comparing questions; a zero-width space makes no other question.
    """
    # Folding can undo the normal form, so NFKC stands on both sides of it.
    folded = unicodedata.normalize("NFKC", text).casefold()
    shown = "".join(c for c in unicodedata.normalize("NFKC", folded) if unicodedata.category(c) != "Cf")
    return " ".join(shown.split())


def question_key(text: str) -> str:
    """The same for questions of the same words and signs in any order: ``3 + 8`` and ``8+3`` ask the same thing.

    Such questions share a split; one of them in training and the other held out would be a leak.
    """
    return " ".join(sorted(re.findall(r"\w+|[^\w\s]", normalised(text))))


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file, in the order of its lines: the one at index ``i`` stands on line ``i + 1``.

    Raises:
        ProblemFileError: no such file, nothing in it, a line that is not one whole problem (see
            :func:`parse_problem`), or an id that an earlier line has.
    """
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        try:
            problem = parse_problem(line)
        except ProblemFileError as error:
            raise ProblemFileError(f"{path}:{number}: {error}") from error
        if problem.id in line_of:
            raise ProblemFileError(
                f"{path}:{number}: field 'id' is {problem.id!r}, which line {line_of[problem.id]} has too: "
                "give each problem an id of its own"
            )
        line_of[problem.id] = number
        problems.append(problem)
    return problems


def parse_problem(line: str) -> Problem:
    """The problem that one line holds.

    Raises:
        ProblemFileError: blank line; no JSON object; a key twice; a number JSON cannot write (NaN,
            infinity, or one past the float range); an unknown or missing field; a text field that is
            no string, or blank, or holds half a surrogate pair; metadata that is no object.
    """
    if not line.strip():
        raise ProblemFileError("the line is blank: remove it")
    try:
        row = json.loads(line, object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite_float)
    except ProblemFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProblemFileError(f"not JSON ({error}): write one JSON object on the line") from error
    return _problem(row)


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write ``problems`` sorted by id, so that the same problems are the same bytes in any order.

    Raises:
        ProblemFileError: what :func:`read_problems` would refuse; the file is then left as it was.
    """
    lines: list[str] = []
    previous: str | None = None
    for problem in sorted(problems, key=lambda problem: problem.id):
        if problem.id == previous:
            raise ProblemFileError(f"{path}: two problems have the id {problem.id!r}: give each its own")
        previous = problem.id
        lines.append(_line(path, problem))
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ProblemFileError(f"{path}: no such file: check the path, or fetch the data with `dvc pull`")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{path}: not UTF-8 ({error}): save it in UTF-8") from error
    if not text:
        raise ProblemFileError(f"{path}: the file is empty: write at least one problem into it")
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    return text.removesuffix("\n").split("\n")


def _line(path: Path, problem: Problem) -> str:
    row = {name: getattr(problem, name) for name in TEXT_FIELDS} | {"metadata": dict(problem.metadata)}
    if problem.context:
        row["context"] = problem.context
    try:
        line = json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False)
        parse_problem(line)  # what cannot be read back is not written
    except (TypeError, ValueError) as error:
        raise ProblemFileError(f"{path}: problem {problem.id!r} cannot be written: {error}") from error
    return line


def _problem(row: Any) -> Problem:
    if not isinstance(row, dict):
        raise ProblemFileError(f"a {type(row).__name__}, not an object: write {{...}} with {', '.join(TEXT_FIELDS)}")
    if unknown := sorted(set(row) - {*TEXT_FIELDS, "metadata", "context"}):
        raise ProblemFileError(f"unknown field {unknown[0]!r}: remove it or put it into 'metadata'")
    for name in (*TEXT_FIELDS, *(["context"] if "context" in row else [])):
        _check_text(row, name)
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ProblemFileError(f"field 'metadata' is {metadata!r:.80}: make it an object or leave it out")
    _check_encodable("metadata", json.dumps(metadata, ensure_ascii=False))
    return Problem(**{name: row[name] for name in TEXT_FIELDS}, metadata=metadata, context=row.get("context", ""))


def _check_text(row: dict[str, Any], name: str) -> None:
    if name not in row:
        raise ProblemFileError(f"field {name!r} is missing: add it as a string")
    value = row[name]
    if not isinstance(value, str):
        raise ProblemFileError(f"field {name!r} is {value!r:.80}: make it a string, in quotes")
    if not value.strip():
        raise ProblemFileError(f"field {name!r} is {value!r:.80}: give it some text")
    _check_encodable(name, value)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ProblemFileError(f"field {name!r} holds half a surrogate pair ({error}): write the whole one") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ProblemFileError(f"field {key!r} stands twice: keep one")
        row[key] = value
    return row


def _refuse_number(text: str) -> NoReturn:
    raise ProblemFileError(f"the number {text} is not JSON: write a finite number, or a string")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_number(text)
    return number

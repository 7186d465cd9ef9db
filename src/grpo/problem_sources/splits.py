"""Which split a problem goes to, and what would leak between two of them.

Questions of the same words share a split whatever their order, and a question stands in one place alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from grpo.problem_files import ProblemFileError, normalised, question_key
from grpo.problem_sources.layout import GivenSplit, Role, SourceRow
from grpo.records import Problem

SPLITS: tuple[GivenSplit, ...] = get_args(GivenSplit)
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Row:
    """A problem, where it was read, and the split it goes to (worked examples have none)."""

    problem: Problem
    place: str
    split: str | None


@dataclass(frozen=True)
class Rejected:
    """A row that is left out, and why."""

    row: Row
    reason: str


def split_of(
    key: str, role: str, *, seed: int, validation: float, heldout: float, given: GivenSplit | None = None
) -> str:
    """The split of a problem, from its question's key, its role and the seed alone: adding rows moves no other.

    The hash is a number in [0, 1). Heldout lies below its share and validation next, so that a new
    ``validation`` moves no problem into or out of heldout. A ``given`` split is kept, but for ``train``, of
    which validation gets its share.
    """
    if role == "heldout_only" or given == "heldout":
        return "heldout"
    if given == "validation":
        return "validation"
    if given == "train":
        heldout = 0.0
    keyed = json.dumps([seed, key]).encode()
    position = int.from_bytes(hashlib.blake2b(keyed, digest_size=8).digest(), "big") / 2**64
    if position < heldout:
        return "heldout"
    return "validation" if position < heldout + validation else "train"


def split_row(row: SourceRow, *, seed: int, validation: float, heldout: float) -> Row:
    """The row with its split.

    Raises:
        ProblemFileError: an unknown role, or a split that its role forbids.
    """
    role = row.problem.metadata.get("role", "train")
    if role not in ROLES:
        raise ProblemFileError(f"{row.place}: metadata.role is {role!r:.60}: choose {' or '.join(ROLES)}")
    if role == "heldout_only" and row.split in ("train", "validation"):
        raise ProblemFileError(
            f"{row.place}: metadata.role is {role!r}, but its source gives it to {row.split}: drop one"
        )
    key = question_key(row.problem.question)
    split = split_of(key, role, seed=seed, validation=validation, heldout=heldout, given=row.split)
    return Row(row.problem, row.place, split)


def repeated_questions(rows: Sequence[Row]) -> list[Rejected]:
    """Each row whose question an earlier row has, or whose words one of another split has."""
    first: dict[str, Row] = {}
    alike: dict[str, Row] = {}
    repeats = []
    for row in rows:
        earlier = first.setdefault(normalised(row.problem.question), row)
        mirror = alike.setdefault(question_key(row.problem.question), row)
        if earlier is row and mirror.split == row.split:
            continue
        earlier = mirror if earlier is row else earlier
        kind = f"within {row.split or 'worked examples'}"
        if earlier.split != row.split:
            kind = f"a leak between {earlier.split} and {row.split}"
        repeats.append(Rejected(row, f"the question of {earlier.place} again ({kind})"))
    return repeats


def held_out_first(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order in which they keep a question that several have: what is held out stays whole."""
    return sorted(rows, key=lambda row: SPLITS[::-1].index(row.split) if row.split in SPLITS else len(SPLITS))


def repeated_ids(rows: Sequence[Row]) -> list[Rejected]:
    """Each row whose id an earlier row has."""
    first: dict[str, Row] = {}
    return [
        Rejected(row, f"field 'id' is {row.problem.id!r}, which {earlier.place} has too")
        for row in rows
        if (earlier := first.setdefault(row.problem.id, row)) is not row
    ]


def leaked_examples(examples: Sequence[Row], rows: Sequence[Row]) -> list[Rejected]:
    """Each worked example whose question, in any order of its words, is in validation or heldout."""
    guarded = {question_key(row.problem.question): row for row in rows if row.split != "train"}
    return [
        Rejected(example, f"the question of {row.place} in {row.split}")
        for example in examples
        if (row := guarded.get(question_key(example.problem.question)))
    ]

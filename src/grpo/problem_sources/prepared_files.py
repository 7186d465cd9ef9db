"""What *prepare* leaves behind: the splits, what was left out, and a summary that says what they were made of."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo.described import described as plainly_described
from grpo.described import dotted, settings_of
from grpo.problem_files import write_problems
from grpo.problem_sources.layout import ProblemSource, SourceRow
from grpo.problem_sources.plain import PlainProblems
from grpo.problem_sources.splits import Rejected
from grpo.records import Problem
from grpo.rewards import RewardComponent
from grpo.whole_files import write_whole

REJECTED_FILE = "rejected.jsonl"


@dataclass(frozen=True)
class Loaded:
    """A source and what it gave."""

    source: ProblemSource
    rows: list[SourceRow]


def data_sha256(loaded: Sequence[Loaded]) -> str:
    """SHA-256 over a line a source, ``<sha256>  <name>``: of a plain file its bytes, of any other the problems it gave.

    The content counts, wherever the folder stands.
    """
    lines = []
    for each in loaded:
        if isinstance(each.source, PlainProblems):
            content, name = each.source.path.read_bytes(), each.source.path.name
        else:
            problems = (json.dumps(asdict(row.problem), sort_keys=True) + "\n" for row in each.rows)
            content, name = "".join(problems).encode(), type(each.source).__name__
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def slice_counts(problems: Sequence[Problem]) -> dict[str, Any]:
    """How many problems, and how many of each slice."""
    slices = Counter(problem.slice for problem in problems)
    return {"problems": len(problems), "slices": dict(sorted(slices.items()))}


def described(value: Any) -> Any:
    """A setting as JSON; a component of the reward by its check, the check's settings, its weight and its limit.

    ``limit_seconds`` stands there where it is not the usual one. For anything else see ``grpo.described``.
    """
    if isinstance(value, RewardComponent):
        limit = {"limit_seconds": value.limit_seconds}
        usual = value.limit_seconds == RewardComponent.limit_seconds
        shown = {"check": dotted(value.check), "weight": value.weight} | settings_of(value.check)
        return shown | ({} if usual else limit)
    if isinstance(value, Mapping):
        return {name: described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    return plainly_described(value)


def rejected_lines(rejected: Sequence[Rejected]) -> bytes:
    """A JSON object a row: where it stood, its id, why it is left out, and the problem."""
    lines = (
        {"place": each.row.place, "id": each.row.problem.id, "reason": each.reason, "problem": asdict(each.row.problem)}
        for each in rejected
    )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def write_prepared(
    output: Path, by_split: Mapping[str, Sequence[Problem]], summary: Mapping[str, Any], rejected: Sequence[Rejected]
) -> None:
    """Write all files aside, then move them in, the summary last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as aside:
        for split, problems in by_split.items():
            write_problems(Path(aside) / f"{split}.jsonl", problems)
        if rejected:
            write_whole(Path(aside) / REJECTED_FILE, rejected_lines(rejected))
        write_whole(Path(aside) / "summary.json", (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode())
        output.mkdir(exist_ok=True)
        (output / REJECTED_FILE).unlink(missing_ok=True)
        for path in sorted(Path(aside).iterdir(), key=lambda path: path.name == "summary.json"):
            os.replace(path, output / path.name)

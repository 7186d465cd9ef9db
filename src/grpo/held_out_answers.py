"""Held-out completions, read twice and judged: a row of ``completions.parquet`` each.

Both readings go to the same scorer. The strict one asks for the answer alone, as the policy was asked
to give it; the lenient one takes what is most likely meant. A gain in the first alone is a gain in form.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.answer_metrics import Attempt
from grpo.records import Problem, Rollout, Score
from grpo.scorers import Scorer, ScorerError, lenient_answer, score_answers, strict_answer

TRAINED_ROLE = "train"


@dataclass(frozen=True)
class HeldOutAnswer:
    """One completion of a held-out problem with both readings. Fields are the table's columns.

    Args:
        role: ``train`` where the policy was trained on problems of this slice, ``heldout_only`` otherwise.
        mode: ``greedy`` or ``sampled``.
        tokens: drawn tokens, the end token included.
        strict_answer: None where the completion was cut off or holds more than an answer.
        strict_score: the scorer's value of it; ``correct`` where that is 1.
        lenient_answer: the strict answer where that one alone is right: the lenient reading is never the worse.
    """

    problem_id: str
    slice: str
    role: str
    question: str
    gold: str
    mode: str
    member: int
    text: str
    tokens: int
    finish_reason: str
    strict_answer: str | None
    strict_score: float
    correct: bool
    lenient_answer: str | None
    lenient_correct: bool

    @property
    def attempt(self) -> Attempt:
        return Attempt(
            problem_id=self.problem_id,
            answered=self.strict_answer is not None,
            correct=self.correct,
            lenient_correct=self.lenient_correct,
            finish_reason=self.finish_reason,
            length=self.tokens,
        )


COMPLETIONS_SCHEMA = pa.schema(
    [
        ("problem_id", pa.string()),
        ("slice", pa.string()),
        ("role", pa.string()),
        ("question", pa.string()),
        ("gold", pa.string()),
        ("mode", pa.string()),
        ("member", pa.int32()),
        ("text", pa.string()),
        ("tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("strict_answer", pa.string()),
        ("strict_score", pa.float64()),
        ("correct", pa.bool_()),
        ("lenient_answer", pa.string()),
        ("lenient_correct", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class _Reading:
    """A completion with both readings of its answer."""

    mode: str
    rollout: Rollout
    strict: str | None
    lenient: str | None


def judge(
    completions: Sequence[tuple[str, Rollout]], scorer: Scorer, limit_seconds: float = 60.0
) -> list[HeldOutAnswer]:
    """Read completions strictly and leniently, and score both answers.

    Args:
        completions: each with its mode, ``greedy`` or ``sampled``.
        scorer: judges the answers, in worker processes where it can be sent to one.
        limit_seconds: of one answer.

    Raises:
        ScorerError: the scorer has no verdict.
    """
    readings = [_read(mode, rollout) for mode, rollout in completions]
    items = [(r.rollout.group.problem, answer) for r in readings for answer in (r.strict, r.lenient)]
    values = iter(_values(score_answers(scorer, items, limit_seconds), items))
    return [_answer(reading, next(values), next(values)) for reading in readings]


def _read(mode: str, rollout: Rollout) -> _Reading:
    # A completion that was cut off has no strict answer: what it would have said last is not known.
    strict = None if rollout.truncated else strict_answer(rollout.text)
    return _Reading(mode, rollout, strict, lenient_answer(rollout.text, rollout.group.problem.answer))


def _answer(reading: _Reading, strict_score: float, lenient_score: float) -> HeldOutAnswer:
    rollout, problem = reading.rollout, reading.rollout.group.problem
    correct = reading.strict is not None and strict_score == 1
    lenient_correct = reading.lenient is not None and lenient_score == 1
    return HeldOutAnswer(
        problem_id=problem.id,
        slice=problem.slice,
        role=role(problem),
        question=problem.question,
        gold=problem.answer,
        mode=reading.mode,
        member=rollout.key.member,
        text=rollout.text,
        tokens=len(rollout.tokens),
        finish_reason=rollout.finish_reason,
        strict_answer=reading.strict,
        strict_score=strict_score,
        correct=correct,
        lenient_answer=reading.strict if correct and not lenient_correct else reading.lenient,
        lenient_correct=correct or lenient_correct,
    )


def role(problem: Problem) -> str:
    """Whether the problem's slice is trained on (``train``) or only held out (``heldout_only``)."""
    return str(problem.metadata.get("role", TRAINED_ROLE))


def unjudged_lines(completions: Sequence[tuple[str, Rollout]]) -> bytes:
    """A JSON object for each completion that :func:`judge` is about to be given."""
    rows = [
        {
            "problem_id": rollout.group.problem.id,
            "mode": mode,
            "member": rollout.key.member,
            "finish_reason": rollout.finish_reason,
            "text": rollout.text,
        }
        for mode, rollout in completions
    ]
    lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    # Half a surrogate pair, which a completion may hold, becomes JSON's own escape of it.
    return "".join(lines).encode(errors="backslashreplace")


def answers_parquet(answers: Sequence[HeldOutAnswer]) -> bytes:
    """The table as a Parquet file's bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([asdict(answer) for answer in answers], schema=COMPLETIONS_SCHEMA), sink)
    return sink.getvalue()


def read_answers(path: Path) -> list[HeldOutAnswer]:
    """Read a table that an evaluation wrote."""
    names = [column.name for column in fields(HeldOutAnswer)]
    return [HeldOutAnswer(**row) for row in pq.read_table(path, columns=names).to_pylist()]


def _values(scores: Sequence[Score], items: Sequence[tuple[Problem, str | None]]) -> list[float]:
    values = []
    for score, (problem, answer) in zip(scores, items, strict=True):
        if score.value is None:
            # A stand-in number would count the scorer's failure as the policy's.
            raise ScorerError(f"the scorer could not judge the answer {answer!r} to {problem.id}: {score.reason}")
        values.append(score.value)
    return values

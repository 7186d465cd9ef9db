"""Held-out completions, read twice and judged: a row of ``completions.parquet`` each.

Both readings go to the same scorer. The strict one asks for the answer in the form declared, as the policy was asked
to give it; the lenient one takes what is most likely meant. A gain in the first alone is a gain in form. Where the
scorer has no verdict the answer is unscored, which is neither right nor wrong.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.answer_metrics import Attempt
from grpo.answer_readings import STRICT, Reading
from grpo.records import Problem, Rollout, Score
from grpo.scorers import Scorer, ScorerError, one_line, score_answers

TRAINED_ROLE = "train"


@dataclass(frozen=True)
class HeldOutAnswer:
    """One completion of a held-out problem with both readings. Fields are the table's columns.

    Args:
        role: ``train`` where the policy was trained on problems of this slice, ``heldout_only`` otherwise.
        mode: ``greedy`` or ``sampled``.
        tokens: drawn tokens, the end token included.
        strict_answer: None where the completion was cut off or the strict reading finds none.
        strict_score: the scorer's value of it; ``correct`` where that is 1. Both None where there is no verdict.
        lenient_answer: the strict answer where that one alone is right: the lenient reading is never the worse. None
            too where no lenient reading stands beside the strict one (programs).
        lenient_correct: whether either reading is right; None where neither is and one of them has no verdict.
        unscored_reason: why a verdict is missing.
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
    strict_score: float | None
    correct: bool | None
    lenient_answer: str | None
    lenient_correct: bool | None
    unscored_reason: str | None = None

    @property
    def unscored(self) -> bool:
        """Whether a verdict is missing that counts."""
        return self.unscored_reason is not None

    @property
    def attempt(self) -> Attempt:
        return Attempt(
            problem_id=self.problem_id,
            answered=self.strict_answer is not None,
            correct=self.correct,
            lenient_correct=self.lenient_correct,
            finish_reason=self.finish_reason,
            length=self.tokens,
            unscored=self.unscored,
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
        ("unscored_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class _Reading:
    """A completion with both readings of its answer; ``twice``: there is a lenient one at all."""

    mode: str
    rollout: Rollout
    strict: str | None
    lenient: str | None
    twice: bool


def judge(
    completions: Sequence[tuple[str, Rollout]],
    scorer: Scorer,
    reading: Reading = STRICT,
    limit_seconds: float = 60.0,
) -> list[HeldOutAnswer]:
    """Read completions strictly and leniently, and score both answers; without a verdict an answer is unscored.

    Args:
        completions: each with its mode, ``greedy`` or ``sampled``.
        scorer: judges the answers, in worker processes where it can be sent to one.
        reading: the strict one.
        limit_seconds: of one answer.
    """
    readings = [_read(mode, rollout, reading) for mode, rollout in completions]
    items = [(r.rollout.group.problem, answer) for r in readings for answer in (r.strict, r.lenient)]
    scores = iter(score_answers(scorer, items, limit_seconds))
    return [_answer(reading, next(scores), next(scores)) for reading in readings]


def _read(mode: str, rollout: Rollout, reading: Reading) -> _Reading:
    # A completion that was cut off has no strict answer: what it would have said last is not known.
    strict = None if rollout.truncated else reading.read(rollout.text)
    return _Reading(
        mode, rollout, strict, reading.read_leniently(rollout.text, rollout.group.problem.answer), reading.lenient
    )


def _answer(reading: _Reading, strict: Score, lenient: Score) -> HeldOutAnswer:
    rollout, problem = reading.rollout, reading.rollout.group.problem
    correct = _right(reading.strict, strict)
    lenient_correct = _right(reading.lenient, lenient)
    either = _either(correct, lenient_correct)
    missing = [score for score in (strict, lenient) if score.value is None and (correct is None or either is None)]
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
        strict_score=strict.value,
        correct=correct,
        lenient_answer=reading.strict if reading.twice and correct and not lenient_correct else reading.lenient,
        lenient_correct=either,
        unscored_reason=(missing[0].reason or "no reason given") if missing else None,
    )


def _right(answer: str | None, score: Score) -> bool | None:
    """Whether the scorer takes the answer for right; None: it does not say. A missing answer is never right."""
    if score.value is None:
        return None
    return answer is not None and score.value == 1


def _either(correct: bool | None, lenient_correct: bool | None) -> bool | None:
    """Whether one of the readings is right, as far as that is known."""
    if correct or lenient_correct:
        return True
    return None if correct is None or lenient_correct is None else False


def refuse_unscored(answers: Sequence[HeldOutAnswer], max_share: float) -> None:
    """Raise where more than ``max_share`` of the answers are without a verdict.

    Raises:
        ScorerError: naming the first of them with its reason, the share and the setting.
    """
    unscored = [answer for answer in answers if answer.unscored]
    share = len(unscored) / len(answers) if answers else 0.0
    if share > max_share:
        first = unscored[0]
        reason = one_line(first.unscored_reason)
        answer = first.strict_answer if first.correct is None else first.lenient_answer
        raise ScorerError(
            f"the scorer could not judge the answer {answer!r:.80} to {first.problem_id}: {reason}; "
            f"{len(unscored)} of {len(answers)} answers ({share:.2%}) are without a verdict, and max_unscored_share is "
            f"{max_share:g}: mend the scorer, or allow a larger share in configs/evaluate.yaml, which leaves them out "
            "of the accuracies"
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
    """Read a table that an evaluation wrote; one of an earlier version has no reasons for missing verdicts."""
    optional = {column.name for column in fields(HeldOutAnswer) if column.default is not MISSING}
    absent = optional.difference(pq.read_schema(path).names)
    names = [column.name for column in fields(HeldOutAnswer) if column.name not in absent]
    return [HeldOutAnswer(**row) for row in pq.read_table(path, columns=names).to_pylist()]

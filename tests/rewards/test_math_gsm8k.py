"""The published grade-school problems: every worked solution holds its own answer, and nobody else's."""

from __future__ import annotations

from functools import cache

import pytest
from cases_folder import cases

from grpo.records import Problem
from grpo.rewards.final_answers import AnswerStyle
from grpo.rewards.math_answer import MathAnswer

FILES = ["data/gsm8k_train.jsonl.gz", "data/gsm8k_test.jsonl.gz"]
STYLES: list[AnswerStyle] = ["any", "gsm8k_strict", "gsm8k_flexible"]


@cache
def solutions(file: str) -> list[tuple[str, str]]:
    """Each problem's final answer with the whole solution."""
    return [(row["answer"].rpartition("####")[2].strip(), row["answer"]) for row in cases(file)]


def values(pairs: list[tuple[str, str]], style: AnswerStyle) -> list[float | None]:
    items = [(Problem("p", "q", gold, "s"), completion) for gold, completion in pairs]
    return [score.value for score in MathAnswer(style=style).score_batch(items)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("file", FILES)
def test_every_solution_is_accepted(file: str, style: AnswerStyle) -> None:
    pairs = solutions(file)
    assert len(pairs) > 1000
    assert set(values(pairs, style)) == {1.0}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("file", FILES)
def test_no_solution_is_accepted_for_the_next_problem(file: str, style: AnswerStyle) -> None:
    pairs = solutions(file)
    shifted = [
        (gold, completion)
        for (gold, _), (own, completion) in zip([*pairs[1:], pairs[0]], pairs, strict=True)
        if int(gold.replace(",", "")) != int(own.replace(",", ""))
    ]
    assert len(shifted) > 1000
    assert set(values(shifted, style)) == {0.0}


def test_the_strict_and_the_flexible_rate_can_be_told_apart() -> None:
    """The same right answers, half of them without the mark that the strict reading asks for."""
    pairs = solutions(FILES[1])[:100]
    unmarked = [(gold, f"It comes to {gold}.") for gold, _ in pairs]
    assert values(pairs + unmarked, "gsm8k_strict").count(1.0) == 100
    assert values(pairs + unmarked, "gsm8k_flexible").count(1.0) == 200

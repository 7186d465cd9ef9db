"""The answer as a number: the completion is one number and nothing else, equal to gold or as near as declared."""

from __future__ import annotations

import math
import re
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

from grpo.records import Problem, Score
from grpo.rewards.exact_answer import final_answer, plain_number

_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
# Differences and products of the numbers that texts can hold, without rounding at any length.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class NumericAnswer:
    """1.0 where the completion has the strict form and its number is gold's, else 0.0.

    The strict form is :func:`~grpo.rewards.exact_answer.final_answer`'s. Beside the plain spellings of a number
    (leading ``+`` and zeros, trailing zeros) thousands may be set apart by commas, all of them or none. No unit,
    percent or currency sign, exponent or fraction is read: such an answer is wrong. Numbers are decimal and never
    become floats. Where gold is no such number, the reward is not applicable.

    Args:
        absolute_tolerance: the greatest distance from gold that is still right; null: none.
        relative_tolerance: the same, as a share of gold's magnitude; of both, the wider counts.
    """

    def __init__(self, absolute_tolerance: float | None = None, relative_tolerance: float | None = None) -> None:
        self.absolute_tolerance = _tolerance("absolute_tolerance", absolute_tolerance)
        self.relative_tolerance = _tolerance("relative_tolerance", relative_tolerance)

    def __call__(self, problem: Problem, completion: str) -> Score:
        gold = read_number(problem.answer.strip())
        if gold is None:
            return Score.not_applicable("the gold answer is no number")
        answer = final_answer(completion)
        number = None if answer is None else read_number(answer)
        if number is None:
            return Score(0.0, reason="not one line holding a number alone", parts={"answer": answer})
        return Score(float(self._right(number, gold)), parts={"answer": answer})

    def _right(self, number: Decimal, gold: Decimal) -> bool:
        # Comparison of decimals is exact and at once at any length, so most answers need no arithmetic.
        if number == gold:
            return True
        share = _EXACT.multiply(self.relative_tolerance, gold.copy_abs())
        return _EXACT.subtract(number, gold).copy_abs() <= max(self.absolute_tolerance, share)


def read_number(text: str) -> Decimal | None:
    """The number that ``text`` is, exactly, with or without thousands commas; else None.

    >>> read_number("+1,234.50"), read_number("1234.5"), read_number("1,23"), read_number("5 apples")
    (Decimal('1234.50'), Decimal('1234.5'), None, None)
    """
    return plain_number(text.replace(",", "") if _GROUPED.fullmatch(text) else text)


def _tolerance(name: str, value: float | None) -> Decimal:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: give a finite number from 0 up, or null for none")
    # Through its text: 0.1 in a config means a tenth, not the float next to it.
    return Decimal(str(value or 0))

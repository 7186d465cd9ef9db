r"""Exact rules for one expression against one: quick, without a library, and silent where they cannot tell.

Most answers are plain numbers, and are decided here; what is left costs a hundred times more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from grpo.rewards.math_bounded import MOST_DIGITS, TooLarge
from grpo.rewards.math_numbers import exact_value
from grpo.rewards.math_open import leaves_open, letters
from grpo.rewards.math_parts import is_equation, is_relation, split_label, split_top
from grpo.rewards.math_text import closing, words_of
from grpo.rewards.math_units import Unit, split_unit

LeafRule = Callable[[str, str], bool | None]

_OPERATORS = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-zA-Z])")
_EXPONENT = re.compile(r"\^\{")
_ANGLE = re.compile(r"m?\\angle ?\{?([A-Z])([A-Z])([A-Z])\}?")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{(\d+)\}")


def decide(*, gold: str, answer: str, worked_out: bool = True) -> bool | None:
    r"""Whether two expressions in canonical spelling are the same answer, where the rules can tell.

    With ``worked_out``, an answer that leaves more to be done than gold is none, whatever its value.

    >>> decide(gold="1/2", answer="0.5"), decide(gold="5", answer="6"), decide(gold=r"x", answer="2x-x")
    (True, False, None)
    >>> decide(gold="5", answer="2+3"), decide(gold="5", answer="2+3", worked_out=False)
    (False, True)
    """
    if gold == answer:
        return True
    together = measured(gold, answer)
    if together is None:
        return False
    if together != (gold, answer):
        return _without_units(gold, answer, together, worked_out)
    verdict = next((found for rule in _FORM_RULES if (found := rule(gold, answer)) is not None), None)
    if verdict is not None:
        return verdict
    verdict = next((found for rule in _VALUE_RULES if (found := rule(gold, answer)) is not None), None)
    if verdict is False or not worked_out or _steps(gold, answer):
        return verdict
    return False if leaves_open(gold=gold, answer=answer) else verdict


def _without_units(gold: str, answer: str, together: tuple[str, str], worked_out: bool) -> bool | None:
    # Before one is turned into the measure of the other, which works it out.
    if worked_out and leaves_open(gold=split_unit(gold)[0], answer=split_unit(answer)[0]):
        return False
    return decide(gold=together[0], answer=together[1], worked_out=False)


def measured(gold: str, answer: str) -> tuple[str, str] | None:
    """Both without their units, in the same measure; None where they measure different things."""
    (gold_body, gold_unit), (body, unit) = split_unit(gold), split_unit(answer)
    if gold_unit is None or unit is None or not (gold_unit.dimension and unit.dimension):
        return gold_body, body
    if gold_unit.dimension != unit.dimension:
        return None
    return (gold_body, body) if gold_unit == unit else (_times(gold_body, gold_unit), _times(body, unit))


def _times(body: str, unit: Unit) -> str:
    value = _value(body)
    if isinstance(value, Fraction) and value.numerator.bit_length() < MOST_DIGITS:
        total = unit.factor * value
        return rf"\frac{{{total.numerator}}}{{{total.denominator}}}"
    return rf"\frac{{{unit.factor.numerator}}}{{{unit.factor.denominator}}}*({body})"


def _by_steps(gold: str, answer: str) -> bool | None:
    """``2+3=5`` for gold 5: every step must have the value of gold, and one be worked out."""
    steps = _steps(gold, answer)
    verdicts = [decide(gold=gold, answer=step, worked_out=False) for step in steps]
    if False in verdicts or (steps and all(decide(gold=gold, answer=step) is False for step in steps)):
        return False
    return True if steps and None not in verdicts else None


def _steps(gold: str, answer: str) -> tuple[str, ...]:
    """What stands between the signs of an equation that leads to an answer; none where it is one itself."""
    if is_relation(gold) or not is_equation(answer):
        return ()
    steps = split_top(split_label(answer)[1], "=")
    return () if any(is_relation(step) for step in steps) else steps


def _by_equation(gold: str, answer: str) -> bool | None:
    """Half of an equation is not the equation."""
    return False if is_equation(gold) and not is_relation(answer) else None


def _by_ellipsis(gold: str, answer: str) -> bool | None:
    """What trails off is said by its text alone."""
    return False if r"\ldots" in gold or r"\ldots" in answer else None


def _by_base(gold: str, answer: str) -> bool | None:
    """``204_5`` is a numeral: its base may be left out where gold names it, and never be another."""
    based, answer_based = _IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer)
    if based and based[1][0].isdigit():
        return answer == based[1]
    return False if answer_based and answer_based[1][0].isdigit() else None


def _by_vertex(gold: str, answer: str) -> bool | None:
    """An angle by three points has its vertex in the middle; the other two have no order."""
    angles = _ANGLE.fullmatch(gold), _ANGLE.fullmatch(answer)
    if angles[0] is None or angles[1] is None:
        return None
    (one, vertex, other), (first, middle, last) = angles[0].groups(), angles[1].groups()
    return vertex == middle and {one, other} == {first, last}


def _by_words(gold: str, answer: str) -> bool | None:
    gold_words, words = words_of(gold), words_of(answer)
    if gold_words is None and words is None:
        return None
    return (words or answer.casefold()) == (gold_words or gold.casefold())


def _by_value(gold: str, answer: str) -> bool | None:
    """Exact values; an answer that is too large to be worked out is not worked out."""
    gold_value, answer_value = _value(gold), _value(answer)
    if isinstance(answer_value, TooLarge):
        return None if isinstance(gold_value, TooLarge) else False
    if gold_value is None or answer_value is None or isinstance(gold_value, TooLarge):
        return None
    return gold_value == answer_value


def _value(text: str) -> Fraction | TooLarge | None:
    try:
        return exact_value(text)
    except TooLarge as error:
        return error


def _by_size(gold: str, answer: str) -> bool | None:
    """A power too large to be worked out, inside whatever else, is none where gold has no such power."""
    return False if _has_huge_power(answer) and not _has_huge_power(gold) else None


def _has_huge_power(text: str) -> bool:
    exponents = (text[match.end() : closing(text, match.end() - 1)] for match in _EXPONENT.finditer(text))
    values = [_value(exponent) for exponent in exponents]
    return any(isinstance(value, TooLarge) or (value is not None and abs(value) > MOST_DIGITS) for value in values)


def _by_working_out(gold: str, answer: str) -> bool | None:
    """An integral, sum, product or limit that gold does not have says what to work out, not what comes out."""
    return False if set(_OPERATORS.findall(answer)) - set(_OPERATORS.findall(gold)) else None


def _by_unknowns(gold: str, answer: str) -> bool | None:
    """A value has no unknown in it."""
    if is_relation(gold) or is_relation(answer) or letters(gold):
        return None
    return False if letters(answer) else None


# What is an answer of another form is decided by that form; what is left, by its value.
_FORM_RULES: tuple[LeafRule, ...] = (_by_steps, _by_equation, _by_ellipsis, _by_base, _by_vertex, _by_words)
_VALUE_RULES: tuple[LeafRule, ...] = (_by_value, _by_size, _by_working_out, _by_unknowns)

r"""What a question asks to work out: its numbers, its operations, its fractions and its measures.

Words are read as signs: ``10 choose 3`` asks for ``\binom{10}{3}``, and ``six factorial`` for ``6!``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo.rewards.math_numbers import exact_value, numbers_in, steps_left
from grpo.rewards.math_text import canonical
from grpo.rewards.math_units import Unit, split_unit

_COUNTED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_A_NUMBER = re.compile(rf"(?<![-\w\\])(?:{'|'.join(_COUNTED)})(?![-\w])", re.IGNORECASE)
_N = r"\(?(-?(?<![\d.])\d+(?:\.\d+)?)\)?"  # from its first digit on: a long number is read once
_SPOKEN = tuple(
    (re.compile(pattern, re.IGNORECASE), to)
    for pattern, to in (
        (r"(?<!\\)\bplus\b", "+"),
        (r"(?<!\\)\bminus\b", "-"),
        (r"(?<!\\)\b(?:multiplied by|times)\b", "*"),
        (r"(?<!\\)\bdivided by\b", "/"),
        (rf"{_N}\s+choose\s+{_N}", r"\\binom{\1}{\2}"),
        (rf"\bn?C\s*\(\s*{_N}\s*,\s*{_N}\s*\)", r"\\binom{\1}{\2}"),
        (rf"(?<!\w)\^?_?\{{?{_N}\}}?\s*C\s*_?\{{?{_N}\}}?", r"\\binom{\1}{\2}"),
        (rf"{_N}\s+factorial\b", r"\1!"),
        (rf"\bfactorial\s+of\s+{_N}", r"\1!"),
        (rf"{_N}\s+squared\b|\bsquare\s+of\s+{_N}", r"\1\2^{2}"),
        (rf"{_N}\s+cubed\b|\bcube\s+of\s+{_N}", r"\1\2^{3}"),
        (rf"{_N}\s+(?:raised\s+)?to\s+the\s+power\s+(?:of\s+)?{_N}", r"\1^{\2}"),
        (rf"{_N}\s+(?:raised\s+)?to\s+the\s+{_N}(?:th)?\b(?:\s+power)?", r"\1^{\2}"),
        (r"(\d)(?:st|nd|rd|th)\b", r"\1"),
    )
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_SIGNS = {
    "power": re.compile(r"[\w)}]\^\{"),
    "factorial": re.compile(r"[\d)}]!"),
    "binomial": re.compile(r"\\binom"),
}
_FRACTION = re.compile(r"\\frac\{-?([\d.]+)\}\{-?([\d.]+)\}|(?<![\d.])\(?-?([\d.]+)\)?/\(?-?([\d.]*\d)", re.ASCII)
_MEASURED = re.compile(
    r"([$€£]?)(?<![\w.])(\d+(?:\.\d+)?)(?:\\text\s*\{([^{}]*)\}|(\^\{\\circ\}[CF]?)"
    r"| ?((?:(?:square|cubic|sq|cu)\.? )?[a-zA-Z]+(?:(?:/| per )[a-zA-Z]+)?))?(\^\{[23]\})?",
    re.ASCII,
)


@dataclass(frozen=True)
class Asked:
    """A question's numbers, the kinds of operation in it, its fractions and its measures, each by value."""

    numbers: frozenset[Fraction]
    kinds: frozenset[str]
    fractions: frozenset[tuple[Fraction, Fraction]]
    measures: frozenset[tuple[Fraction, Unit]]


def in_signs(question: str) -> str:
    r"""The question with its words for numbers and operations in signs.

    >>> in_signs("Compute 10 choose 3."), in_signs("six factorial"), in_signs("5 squared, 7 cubed")
    ('Compute \\binom{10}{3}.', '6!', '5^{2}, 7^{3}')
    """
    question = _A_NUMBER.sub(lambda match: str(_COUNTED.index(match[0].lower())), question)
    for pattern, to in _SPOKEN:
        question = pattern.sub(to, question)
    return question


@lru_cache(maxsize=4_096)
def read_question(question: str) -> Asked:
    text = canonical(in_signs(question).replace("\n", " ; "))
    values = {one: exact_value(one) for one in set(_NUMBER.findall(text))}
    pairs = ((exact_value(a or c), exact_value(b or d)) for a, b, c, d in _FRACTION.findall(text))
    return Asked(
        numbers=frozenset(value for value in values.values() if value is not None),
        kinds=frozenset(kind for kind, sign in _SIGNS.items() if sign.search(text)),
        fractions=frozenset((upper, lower) for upper, lower in pairs if upper is not None and lower),
        measures=frozenset(_measures(text)),
    )


def _measures(text: str) -> set[tuple[Fraction, Unit]]:
    found = set()
    for money, number, marked, degrees, word, power in _MEASURED.findall(text):
        named = rf"\text{{ {marked or word}}}{power}" if marked or word else ""
        for spelt in (f"{money}{number}", f"{number}{degrees or named}"):
            unit, value = split_unit(spelt)[1], exact_value(number)
            if unit is not None and unit.dimension and value is not None:
                found.add((value, unit))
    return found


def only_operands_of(question: str, *, answer: str, gold: str) -> bool:
    r"""Whether arithmetic leaves open what the question asks for: the same operations on the same numbers.

    >>> only_operands_of("Compute 4!", answer="4.0!", gold="24"), only_operands_of("4 books", answer="4!", gold="24")
    (True, False)
    """
    left, in_gold = steps_left(answer), steps_left(gold)
    if not left or in_gold is None:
        return False
    kinds = {kind for kind in left if left[kind] > in_gold[kind]}
    operands = {value for value in numbers_in(answer) if value != 1}
    if not kinds or not operands:
        return False
    asked = read_question(question)
    if kinds <= {"fraction", "quotient"}:
        value = exact_value(answer)
        return any(
            operands <= {upper, lower} or ("quotient" in kinds and value is not None and upper / lower == abs(value))
            for upper, lower in asked.fractions
        )
    return kinds - {"fraction", "quotient"} <= asked.kinds and operands <= asked.numbers


def measure_asked(question: str, *, answer: str, gold: str) -> bool:
    r"""Whether the answer is a measure that stands in the question, and gold is the same in another unit.

    >>> measure_asked("Convert 5 km to m.", answer=r"5\text{ km}", gold=r"5000\text{ m}")
    True
    """
    (_, wanted), (body, unit) = split_unit(gold), split_unit(answer)
    if wanted is None or unit is None or not unit.dimension or wanted == unit:
        return False
    value = exact_value(body)
    return value is not None and (value, unit) in read_question(question).measures

r"""Whether an answer is the question again: what to work out, in another order or with other brackets.

What an answer leaves open is seen without the question where gold is a number. Among unknowns and roots forms are
many, and ``3x+2x`` for ``5x`` is told from an answer only by what was asked.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from grpo.rewards.math_asked import in_signs, measure_asked, only_operands_of
from grpo.rewards.math_bare import bare, trimmed
from grpo.rewards.math_bounded import TooLarge
from grpo.rewards.math_parts import split_top
from grpo.rewards.math_text import canonical

_TOKEN = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]+|\d+(?:\.\d+)?|\S")
# Brackets only group; what is multiplied or added stays the same in another order.
_UNSEEN = frozenset("(){}[]*+") | {r"\text"}
_OPERATION = re.compile(r"[\w)}!][-+*^(]|/|[!\\%]|[a-zA-Z\d)][a-zA-Z(]")
_FRACTION = re.compile(r"(?<![\w.])\\frac\{(\d+)\}\{(\d+)\}|(?<![\w.])(\d+)/(\d+)(?![\w.])", re.ASCII)
_REPEATED = re.compile(r"(?<![\w.])(\d+|[a-zA-Z])\^\{([2-9])\}", re.ASCII)
_TEN = re.compile(r"(?<![\w.])10\^\{(\d{1,2})\}", re.ASCII)
_FACTORIAL = re.compile(r"(?<![\w.])(\d{1,2})!", re.ASCII)
_FRACTION_SIGN = "/"


def restates(question: str, answer: str, gold: str) -> bool:
    r"""Whether the answer, of gold's value, is made of the same signs as some part of the question, and gold is not.

    >>> restates("Add 2x and 3x: 2x + 3x =", "3x+2x", "5x"), restates("12 * 12 =", "12^2", "144")
    (True, True)
    >>> restates("Is 2x + 3 a line?", "3+2x", "2x+3"), restates("12 + 3 =", "15.0", "15")
    (False, False)
    """
    answer, gold = canonical(answer), canonical(gold)
    if measure_asked(question, answer=answer, gold=gold):
        return True
    spelt, gold = bare(answer), bare(gold)
    if not _OPERATION.search(spelt.lstrip("-")) or spelt == gold:
        return False
    if _reduces_nothing(question, spelt, gold) or _arithmetic_asked(question, spelt, gold):
        return True
    if _of_gold(spelt, gold):
        return False
    asked = _asked(question)
    steps = split_top(spelt, "=")
    return _stands_in(asked, spelt) or all(_stands_in(asked, step) and not _of_gold(step, gold) for step in steps)


def _arithmetic_asked(question: str, answer: str, gold: str) -> bool:
    try:
        return only_operands_of(question, answer=answer, gold=gold)
    except TooLarge:
        return False


def _of_gold(text: str, gold: str) -> bool:
    return _counted(text) == _counted(gold)


@lru_cache(maxsize=4_096)
def _asked(question: str) -> tuple[tuple[str, ...], ...]:
    """The runs of mathematics in a question, cut at words and punctuation."""
    text = canonical(in_signs(question).replace("\n", " ; "))
    return (*_runs(text), *_runs(trimmed(text)))


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    runs: list[list[str]] = [[]]
    for token in _tokens(_written_out(text)):
        if re.fullmatch(r"[^\W\d_]{2,}|[,;:.?&$]", token):
            runs.append([])
        else:
            runs[-1].append(token)
    return (tuple(run) for run in runs if len(run) > 1)


def _tokens(text: str) -> Iterator[str]:
    for token in _TOKEN.findall(text):
        if token not in _UNSEEN:
            yield _FRACTION_SIGN if token == r"\frac" else token


def _counted(text: str) -> Counter[str]:
    return Counter(_tokens(text))


def _written_out(text: str) -> str:
    return _REPEATED.sub(lambda match: "*" + "*".join([match[1]] * int(match[2])) + "*", text)


def _forms(text: str) -> set[str]:
    """The answer, and what its powers and factorials are short for."""
    in_digits = _TEN.sub(lambda match: "1" + "0" * int(match[1]), text)
    factors = _FACTORIAL.sub(lambda match: "*".join(map(str, range(2, int(match[1]) + 1))), text)
    return {_written_out(text), in_digits, factors, factors + "*1"}


def _stands_in(runs: tuple[tuple[str, ...], ...], text: str) -> bool:
    """Whether as many tokens in a row of some run are the same ones, in whatever order."""
    return any(_made_of(runs, _counted(form)) for form in _forms(text))


def _made_of(runs: tuple[tuple[str, ...], ...], wanted: Counter[str]) -> bool:
    size = wanted.total()
    return size > 1 and any(wanted in _windows(run, size) for run in runs if len(run) >= size)


def _windows(run: tuple[str, ...], size: int) -> Iterator[Counter[str]]:
    window = Counter(run[:size])
    yield window
    for gone, come in zip(run, run[size:], strict=False):
        window[gone] -= 1
        window[come] += 1
        yield window  # a count of none is as good as no count to a comparison of counters


def _reduces_nothing(question: str, answer: str, gold: str) -> bool:
    """A fraction that can be reduced, where the question has one of that value: ``4/6`` after "Reduce 2/3 of ...".

    Gold may be such a fraction itself.
    """
    found = _FRACTION.fullmatch(answer)
    if found is None or _FRACTION.fullmatch(gold) is None:
        return False
    upper, lower = _pair(found)
    if math.gcd(upper, lower) == 1 or (upper, lower) == _pair(_FRACTION.fullmatch(gold)):
        return False
    return any(upper * other[1] == lower * other[0] for other in map(_pair, _FRACTION.finditer(canonical(question))))


def _pair(match: re.Match[str] | None) -> tuple[int, int]:
    assert match is not None
    return int(match[1] or match[3]), int(match[2] or match[4])

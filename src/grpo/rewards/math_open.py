r"""What an answer leaves open: an expression that is still to be worked out is no answer where gold is worked out.

``3+12``, ``(12)+3`` and ``\frac{30}{2}`` have the value 15 and would be had from the question for nothing. So an
answer may leave no more to be done than gold does. A number may be written in any way that is a number (a fraction in
lowest terms, percent, ``1.5 \times 10^3``) or as one power, factorial or binomial, such as combinatorics gives.
"""

from __future__ import annotations

import re
from collections import Counter

from grpo.rewards.math_numbers import steps_left
from grpo.rewards.math_parts import is_relation, sides

_PLAIN = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_CONSTANTS = frozenset("ei")
# One of these alone is a short way to write a number; beside others it is a step.
_SHORT = ("power", "factorial", "binomial")
_FUNCTIONS = {
    "root": re.compile(r"\\sqrt|\^\{[^{}]*(?:/|\\frac|\.\d)"),
    "angle": re.compile(r"\\(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)"),
    "logarithm": re.compile(r"\\(?:log|ln|lg)(?![a-zA-Z])"),
    "size": re.compile(r"\||\\[lr]?[vV]ert"),
    "other": re.compile(r"\\(?:gcd|lcm|max|min|det|[lr]floor|[lr]ceil|Gamma|zeta|Re|Im|[bp]?mod|begin)(?![a-zA-Z])"),
}
_DERIVATIVE = re.compile(
    r"\\frac\{(?:d|\\partial)(?![a-ce-zA-Z]{2})[^{}]*(?:\{\d+\})?[^{}]*\}\{(?:d|\\partial) ?[a-zA-Z]"
    r"|(?<![a-zA-Z])d(?:\^\{\d+\})?[a-zA-Z]?/d[a-zA-Z]|\\(?:partial|nabla)(?![a-zA-Z])|(?<![a-zA-Z])D_|[)}\]]'"
)
_SUM = re.compile(r"(?<=[\w)}\]!%.])[-+]")
_PRODUCT_OF_SUMS = re.compile(r"[\w)}]\(|\)\^|\)[\w\\]")
# Two bare numbers with a sign between them, neither of them a factor, an exponent or the like.
_NUMBERS = re.compile(
    r"(?<![\w.)}\]^*/!])\d+(?:\.\d+)?[-+]\d+(?:\.\d+)?(?![\w.({\\^!*/])|(?<![\w.^)}])\d+\*\d+(?:\.\d+)?(?![\w.^!])"
)


def leaves_open(*, gold: str, answer: str) -> bool:
    r"""Whether the answer, in canonical spelling, leaves more to be worked out than gold.

    >>> [leaves_open(gold="15", answer=answer) for answer in ("12+3", r"\sqrt{225}", "3*10^{0}*5", "15.0", "1500%")]
    [True, True, True, False, False]
    """
    if _PLAIN.fullmatch(answer):
        return False
    if _DERIVATIVE.search(answer) and not _DERIVATIVE.search(gold):
        return True
    if is_relation(answer) or is_relation(gold):
        return _unsolved(gold, answer) or _more_numbers(gold, answer)
    if letters(gold):
        return _more_numbers(gold, answer)
    left = steps_left(gold)
    if left is not None and not any(left[kind] for kind in _SHORT):
        return _more_steps(left, answer)
    return _more_functions(gold, answer) or len(_SUM.findall(answer)) > _most_sums(gold)


def letters(text: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z]", _COMMAND.sub(" ", text))) - _CONSTANTS


def _more_steps(gold: Counter[str], answer: str) -> bool:
    """Beside a plain number. What has its value and is no arithmetic at all is a function of something."""
    left = steps_left(answer)
    if left is None:
        return True
    if left["quotient"] > gold["quotient"] + gold["fraction"]:  # beside a fraction another may be left unreduced
        return True
    return any(left[kind] > gold[kind] for kind in ("sum", "product")) or sum(left[kind] > 0 for kind in _SHORT) > 1


def _more_functions(gold: str, answer: str) -> bool:
    return any(pattern.search(answer) and not pattern.search(gold) for pattern in _FUNCTIONS.values())


def _most_sums(gold: str) -> int:
    """As many signs as gold has, or as many as come of it when its sums are multiplied out."""
    count = len(_SUM.findall(gold))
    return 2 ** min(count, 20) - 1 if _PRODUCT_OF_SUMS.search(gold) else count


def _more_numbers(gold: str, answer: str) -> bool:
    """Among unknowns, where forms are many: only bare numbers that are not put together, as in ``2x+3-1``."""
    in_answer, in_gold = (_NUMBERS.search(_COMMAND.sub(" ", text)) for text in (answer, gold))
    return in_answer is not None and in_gold is None


def _unsolved(gold: str, answer: str) -> bool:
    """``3x+1>7`` for ``x>2``: the question, where gold has the unknown alone."""
    return is_relation(answer) and not _solved(answer) and (_solved(gold) or not is_relation(gold))


def _solved(text: str) -> bool:
    """Whether the unknown stands alone: each side is a name or has no unknown in it."""
    return is_relation(text) and all(re.fullmatch(r"[a-zA-Z]", side) or not letters(side) for side in sides(text))

r"""The exact value of plain arithmetic, as a fraction: no floating point, and nothing that could take long.

Numbers of any length, decimals, repeating decimals, percent, ``\frac``, mixed numbers, powers, factorials,
binomials and the four operations. Anything else is no plain arithmetic, and is left to a checker that may be
killed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache

from grpo.rewards.math_bounded import NoArithmetic, TooLarge, binomial, bounded, factorial, integer, number, power

_DEEPEST = 50

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:\\overline\{\d+\})?|\.\d+(?:\\overline\{\d+\})?)"
    r"|(?P<command>\\(?:frac|binom)(?![a-zA-Z]))|(?P<sign>[-+*/^!%(){}\[\]]))",
    re.ASCII,
)


def exact_value(text: str) -> Fraction | None:
    r"""The value of plain arithmetic in canonical spelling; None where ``text`` is anything else.

    Raises:
        TooLarge: it is plain arithmetic, but too large to be worked out.

    >>> exact_value("1.50"), exact_value(r"2\frac{1}{2}"), exact_value(r"0.\overline{3}"), exact_value("x")
    (Fraction(3, 2), Fraction(5, 2), Fraction(1, 3), None)
    """
    try:
        return _Reader(text).value()
    except (NoArithmetic, ZeroDivisionError):
        return None


@lru_cache(maxsize=4_096)  # the members of a group share their gold
def steps_left(text: str) -> Counter[str] | None:
    r"""What plain arithmetic leaves to be done, by kind; None where ``text`` is anything else.

    A sign, percent and ``1.2*10^{5}`` are ways to write a number, and leave nothing; so is a fraction of whole
    numbers in lowest terms, which is counted as one.

    >>> steps_left("12+3"), steps_left(r"\frac{30}{2}"), steps_left(r"-2\frac{1}{2}"), steps_left("1.2*10^{5}")
    (Counter({'sum': 1}), Counter({'quotient': 1}), Counter({'fraction': 1}), Counter())
    """
    try:
        reader = _Reader(text)
        reader.value()
    except (NoArithmetic, ZeroDivisionError, TooLarge):
        return None
    return +reader.steps


def numbers_in(text: str) -> set[Fraction]:
    r"""The numbers that plain arithmetic is made of, without their signs.

    >>> sorted(numbers_in("(-5.0)^{2}"))
    [Fraction(2, 1), Fraction(5, 1)]
    """
    return {number(token) for token in _tokens(text) if token[0].isdigit() or token[0] == "."}


class _Reader:
    """Recursive descent over the tokens; one method a level of precedence."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.place = 0
        self.depth = 0
        self.steps: Counter[str] = Counter()  # what is left to be done, by kind

    def value(self) -> Fraction:
        value = self.sum()
        if self.place != len(self.tokens):
            raise NoArithmetic
        return value

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise NoArithmetic
        self.place += 1
        return token

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NoArithmetic
        sign = {"-": -1, "+": 1}.get(self.peek(), 0)
        self.place += sign != 0
        total = (sign or 1) * self.product()
        while self.peek() in ("+", "-"):
            operator = self.take()
            self.steps["sum"] += 1
            term = self.product()
            total = bounded(total + term if operator == "+" else total - term)
        self.depth -= 1
        return total

    def product(self) -> Fraction:
        start = self.place
        total = self.power()
        while True:
            token = self.peek()
            if token in ("*", "/"):
                operator = self.place
                self.take()
                sign = -1 if self.peek() == "-" else 1
                self.place += self.peek() == "-"
                factor = sign * self.power()
                self.count_step(token, (start, operator), (operator + 1, self.place))
                total = bounded(total * factor if token == "*" else total / factor)
            elif token in ("(", r"\frac", r"\binom"):
                self.steps["product"] += 1
                total = bounded(total * self.power())
            else:
                return total

    def count_step(self, operator: str, left: tuple[int, int], right: tuple[int, int]) -> None:
        """A product or quotient of what stands at these places, unless it is a way to write one number."""
        first, second = self.tokens[slice(*left)], self.tokens[slice(*right)]
        if operator == "/":
            self.steps["fraction" if _in_lowest_terms(first, second) else "quotient"] += 1
        elif len(first) == 1 and first[0][-1].isdigit() and second[:2] == ["10", "^"]:
            self.steps["power"] -= 1
        else:
            self.steps["product"] += 1

    def power(self) -> Fraction:
        start = self.peek()
        base = self.postfix(self.base())
        if self.peek() == r"\frac" and start.isdigit() and self.tokens[self.place - 1] == start:
            return self.postfix(self.mixed(base))
        if self.peek() == "^":
            self.take()
            self.steps["power"] += 1
            base = self.postfix(power(base, self.exponent()))
        return base

    def exponent(self) -> Fraction:
        """To the right first: 2^3^2 is 2^9."""
        exponent = self.base()
        if self.peek() == "^":
            self.take()
            self.steps["power"] += 1
            return power(exponent, self.exponent())
        return exponent

    def mixed(self, whole: Fraction) -> Fraction:
        r"""``2\frac{1}{2}`` is two and a half, as it is written; beside a fraction of no digits it is a product."""
        fraction = self.base()
        self.steps["product"] += not 0 <= fraction < 1
        return whole + fraction if 0 <= fraction < 1 else bounded(whole * fraction)

    def postfix(self, value: Fraction) -> Fraction:
        while self.peek() in ("!", "%"):
            self.steps["factorial"] += self.peek() == "!"
            value = factorial(value) if self.take() == "!" else value / 100
        return value

    def base(self) -> Fraction:
        token = self.take()
        if token in ("(", "{", "["):
            self.steps["sum"] += self.peek() == "-" and self.tokens[max(self.place - 2, 0)] in "+-"  # -(-5)
            value = self.sum()
            self.take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token in (r"\frac", r"\binom"):
            return self.fraction() if token == r"\frac" else self.binomial()
        if token[0].isdigit() or token[0] == ".":
            return number(token)
        raise NoArithmetic

    def fraction(self) -> Fraction:
        start = self.place
        upper = self.group()
        middle = self.place
        lower = self.group()
        first, second = self.tokens[start + 1 : middle - 1], self.tokens[middle + 1 : self.place - 1]
        self.steps["fraction" if _in_lowest_terms(first, second) else "quotient"] += 1
        return bounded(upper / lower)

    def binomial(self) -> Fraction:
        self.steps["binomial"] += 1
        return binomial(self.group(), self.group())

    def group(self) -> Fraction:
        self.take("{")
        value = self.sum()
        self.take("}")
        return value


def _in_lowest_terms(upper: list[str], lower: list[str]) -> bool:
    """Whether both are whole numbers as they stand, without a common factor."""
    digits = [side[1:] if side[:1] in (["-"], ["+"]) else side for side in (upper, lower)]
    if not all(len(side) == 1 and side[0].isdigit() for side in digits):
        return False
    return math.gcd(integer(digits[0][0]), integer(digits[1][0])) == 1


def _tokens(text: str) -> list[str]:
    # Two numbers with a space between are no number, except a mixed one such as "2 1/2".
    text = re.sub(r"(?<![\d./^)}])(\d+) (\d+)/(\d+)(?![\d.^])", r"\1\\frac{\2}{\3}", text)
    tokens: list[str] = []
    end = 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None or (match["number"] and tokens and re.match(r"[\d.)}!%\]]", tokens[-1][-1])):
            # A digit after a bracket that closes an argument is a factor only where an operator says so.
            raise NoArithmetic
        tokens.append(match[0].strip())
        end = match.end()
    return tokens

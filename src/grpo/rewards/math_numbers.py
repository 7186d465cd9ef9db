r"""The exact value of plain arithmetic, as a fraction: no floating point, and nothing that could take long.

Numbers of any length, decimals, repeating decimals, percent, ``\frac``, mixed numbers, powers, factorials,
binomials and the four operations. Anything else is no plain arithmetic, and is left to a checker that may be
killed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

# A value with more digits than this is not worked out: such an answer says how to compute, not what comes out.
MOST_DIGITS = 10_000
_MOST_BITS = round(MOST_DIGITS * math.log2(10))
_MOST_FACTORIAL = 3_000  # 3000! has 9131 digits
_DEEPEST = 50

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:\\overline\{\d+\})?|\.\d+(?:\\overline\{\d+\})?)"
    r"|(?P<command>\\(?:frac|binom)(?![a-zA-Z]))|(?P<sign>[-+*/^!%(){}\[\]]))",
    re.ASCII,
)


class NoArithmetic(Exception):
    """The text is not plain arithmetic."""


class TooLarge(Exception):
    """The value, or one on the way to it, has more than ``MOST_DIGITS`` digits."""


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


class _Reader:
    """Recursive descent over the tokens; one method a level of precedence."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.place = 0
        self.depth = 0

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
            term = self.product()
            total = _bounded(total + term if operator == "+" else total - term)
        self.depth -= 1
        return total

    def product(self) -> Fraction:
        total = self.power()
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.take()
                sign = -1 if self.peek() == "-" else 1
                self.place += self.peek() == "-"
                factor = sign * self.power()
                total = _bounded(total * factor if token == "*" else total / factor)
            elif token in ("(", r"\frac", r"\binom"):
                total = _bounded(total * self.power())
            else:
                return total

    def power(self) -> Fraction:
        start = self.peek()
        base = self.postfix(self.base())
        if self.peek() == r"\frac" and start.isdigit() and self.tokens[self.place - 1] == start:
            return self.mixed(base)
        if self.peek() == "^":
            self.take()
            base = self.postfix(_power(base, self.exponent()))
        return base

    def exponent(self) -> Fraction:
        """To the right first: 2^3^2 is 2^9."""
        exponent = self.base()
        if self.peek() == "^":
            self.take()
            return _power(exponent, self.exponent())
        return exponent

    def mixed(self, whole: Fraction) -> Fraction:
        r"""``2\frac{1}{2}`` is two and a half, as it is written; beside a fraction of no digits it is a product."""
        fraction = self.base()
        return whole + fraction if 0 <= fraction < 1 else _bounded(whole * fraction)

    def postfix(self, value: Fraction) -> Fraction:
        while self.peek() in ("!", "%"):
            value = _factorial(value) if self.take() == "!" else value / 100
        return value

    def base(self) -> Fraction:
        token = self.take()
        if token in ("(", "{", "["):
            value = self.sum()
            self.take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token in (r"\frac", r"\binom"):
            first, second = self.group(), self.group()
            return _bounded(first / second) if token == r"\frac" else _binomial(first, second)
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        raise NoArithmetic

    def group(self) -> Fraction:
        self.take("{")
        value = self.sum()
        self.take("}")
        return value


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


def _number(token: str) -> Fraction:
    plain, _, repeating = token.partition(r"\overline{")
    whole, _, decimals = plain.partition(".")
    if not repeating:
        return Fraction(_integer((whole or "0") + decimals), 10 ** len(decimals))
    if "." not in plain:
        raise NoArithmetic
    period = repeating.removesuffix("}")
    shifted = _integer((whole or "0") + decimals + period) - _integer((whole or "0") + decimals)
    return Fraction(shifted, 10 ** len(decimals) * (10 ** len(period) - 1))


def _integer(digits: str) -> int:
    # Python refuses to convert more at once, to keep the conversion from taking long.
    if len(digits) > 4_000:
        raise TooLarge
    return int(digits)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise TooLarge
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NoArithmetic
    if base in (0, 1, -1):
        return base ** (exponent.numerator % 2 or 2)
    size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if max(size, 1) * abs(exponent.numerator) > _MOST_BITS:
        raise TooLarge
    return _bounded(base**exponent.numerator)


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise NoArithmetic
    if value > _MOST_FACTORIAL:
        raise TooLarge
    return Fraction(math.factorial(value.numerator))


def _binomial(upper: Fraction, lower: Fraction) -> Fraction:
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0 or lower < 0:
        raise NoArithmetic
    if upper > _MOST_FACTORIAL:
        raise TooLarge
    return Fraction(math.comb(upper.numerator, lower.numerator))

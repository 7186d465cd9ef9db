"""Exact arithmetic that cannot take long: what would grow too large is refused before it is computed."""

from __future__ import annotations

import math
from fractions import Fraction

# A value with more digits than this is not worked out: such an answer says how to compute, not what comes out.
MOST_DIGITS = 10_000
_MOST_BITS = round(MOST_DIGITS * math.log2(10))
_MOST_FACTORIAL = 3_000  # 3000! has 9131 digits


class NoArithmetic(Exception):
    """The text is not plain arithmetic."""


class TooLarge(Exception):
    """The value, or one on the way to it, has more than ``MOST_DIGITS`` digits."""


def number(token: str) -> Fraction:
    plain, _, repeating = token.partition(r"\overline{")
    whole, _, decimals = plain.partition(".")
    if not repeating:
        return Fraction(integer((whole or "0") + decimals), 10 ** len(decimals))
    if "." not in plain:
        raise NoArithmetic
    period = repeating.removesuffix("}")
    shifted = integer((whole or "0") + decimals + period) - integer((whole or "0") + decimals)
    return Fraction(shifted, 10 ** len(decimals) * (10 ** len(period) - 1))


def integer(digits: str) -> int:
    # Python refuses to convert more at once, to keep the conversion from taking long.
    if len(digits) > 4_000:
        raise TooLarge
    return int(digits)


def bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise TooLarge
    return value


def power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise NoArithmetic
    if base in (0, 1, -1):
        return base ** (exponent.numerator % 2 or 2)
    size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if max(size, 1) * abs(exponent.numerator) > _MOST_BITS:
        raise TooLarge
    return bounded(base**exponent.numerator)


def factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise NoArithmetic
    if value > _MOST_FACTORIAL:
        raise TooLarge
    return Fraction(math.factorial(value.numerator))


def binomial(upper: Fraction, lower: Fraction) -> Fraction:
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0 or lower < 0:
        raise NoArithmetic
    if upper > _MOST_FACTORIAL:
        raise TooLarge
    return Fraction(math.comb(upper.numerator, lower.numerator))

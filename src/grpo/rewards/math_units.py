r"""Units at the end of an answer: dropped where one side has none, converted where both name one.

Words that are no known measure ("5 apples") say what is counted and are dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_TABLE = {
    "length": "m meter metre 1; mm millimeter millimetre 1/1000; cm centimeter centimetre 1/100; dm decimeter 1/10; "
    "km kilometer kilometre 1000; inch inche in 0.0254; foot feet ft 0.3048; yard yd 0.9144; mile mi 1609.344",
    "mass": "g gram gm 1; mg milligram 1/1000; kg kilogram 1000; tonne 1000000; lb pound 453.59237; "
    "ounce oz 28.349523125",
    "time": "s sec second 1; ms millisecond 1/1000; min minute 60; h hr hour 3600; day 86400; week wk 604800",
    "volume": "l liter litre 1; ml milliliter millilitre 1/1000; cl 1/100; gallon gal 3.785411784",
    "dollars": "$ dollar usd buck 1; ¢ cent 1/100; penny pennie 1/100; dime 1/10; quarter 1/4; nickel 1/20",
    "euros": "€ euro eur 1",
    "pounds sterling": "£ gbp 1",
    "angle": r"° degree deg 1",
    "speed": "mph 1397/3125; kmh kph 5/18",
    "months": "month 1; year yr 12",
    "temperature in C": "°c 1",
    "temperature in F": "°f 1",
}


@dataclass(frozen=True)
class Unit:
    """What a unit measures, and how many of the base unit it is; no dimension: a word that measures nothing."""

    dimension: str = ""
    factor: Fraction = Fraction(1)


_UNITS = {
    name: Unit(dimension, Fraction(entry.split()[-1]))
    for dimension, row in _TABLE.items()
    for entry in row.split(";")
    for name in entry.split()[:-1]
}
# Letters alone are units only as text: "3 m" without a mark may be three times m.
_PLAIN = "|".join(sorted((re.escape(name) for name in _UNITS if len(name) > 1), key=len, reverse=True))
_POWER = r"(?:\^\{?[23]\}?)?"
_GROUP = rf"\\text\s*\{{[^{{}}\d,]*\}}{_POWER}"
_MARKED = re.compile(rf"\s*({_GROUP}(?:\s*+(?:[/*]\s*+)?{_GROUP})*+)$")
_MEASURE = rf"\s*(?:{_PLAIN})s?{_POWER}(?:/(?:{_PLAIN}|[smhl]))?"
_THINGS = rf"(?: [a-zA-Z]{{3,}}|[a-zA-Z]{{4,}})(?: [a-zA-Z]+)*{_POWER}"
_BARE = re.compile(rf"(?<=[\d}}%])({_MEASURE}|{_THINGS})$")
_DEGREES = re.compile(r"\^\{\\circ\}\s*([CF]?)$")
_MONEY = re.compile(r"^([-+]?)([$€£])([-+]?)\s*(?=[\d.\\(])|([$€£])$")
_OF_ANGLE = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
# Words of which none stands in a unit: with one, the text says something about the number.
_CHANGING = (
    "or and not nor either neither wrong maybe plus minus times over divided multiplied by squared cubed factorial "
    "power root less more fewer than least most dozen score hundred thousand million billion trillion hundreds "
    "thousands millions billions half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths "
    "seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths zero one "
    "two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety"
)
_NO_UNIT = frozenset(_CHANGING.split())
_FUNCTIONS = frozenset({"sin", "cos", "tan", "log", "exp", "mod", "det", "gcd", "lcm", "max", "min"})


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""An answer in canonical spelling without its unit, and the unit.

    >>> split_unit("$5"), split_unit("12 apples")[0], split_unit("3x")
    (('5', Unit(dimension='dollars', factor=Fraction(1, 1))), '12', ('3x', None))
    """
    if money := _MONEY.search(text):
        body = _MONEY.sub(r"\1\3", text)
        if _MONEY.search(body):  # more than one sign is no amount of money
            return text, None
        inner, unit = split_unit(body)
        return (inner, _UNITS[money[2] or money[4]]) if unit is None or not unit.dimension else (inner, unit)
    degrees = _DEGREES.search(text)
    if degrees and not _OF_ANGLE.search(text):  # in "sin 30°" the sign belongs to the argument
        return _found(text, degrees.start(), f"°{degrees[1]}")
    for pattern in (_MARKED, _BARE):
        match = pattern.search(text)
        if match and match.start() and not _FUNCTIONS & set(match[1].split()):
            return _found(text, match.start(), match[1])
    return text, None


def _found(text: str, start: int, unit: str) -> tuple[str, Unit | None]:
    body = text[:start].rstrip("* ")
    if _NO_UNIT & set(re.findall("[a-z]+", unit.lower())):
        return text, None
    # A unit follows a quantity; after an operator, or a word, the text is no unit.
    if not body or body[-1] in "+-*/=^_,<>" or body.endswith(r"\text") or not re.search(r"\d|\\pi|\\sqrt|[a-z]$", body):
        return text, None
    return body, read_unit(unit)


def read_unit(text: str) -> Unit:
    """The unit that ``text`` names, with powers and quotients of known ones."""
    name = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).lower()
    parts = re.split(r"/|\bper\b", name)
    units = [_power(part) for part in parts]
    if any(not unit.dimension for unit in units) or len(units) > 2:
        return Unit()
    if len(units) == 1:
        return units[0]
    return _speed(units[0], units[1])


def _speed(upper: Unit, lower: Unit) -> Unit:
    factor = upper.factor / lower.factor
    together = f"{upper.dimension}/{lower.dimension}"
    return Unit("speed" if together == "length/time" else together, factor)


def _power(name: str) -> Unit:
    exponent = re.search(r"\^\{?([23])", name)
    power = int(exponent[1]) if exponent else 1
    words = re.sub(r"\^\{?[23]\}?|[.*]", " ", name).split()
    for word, value in (("square", 2), ("sq", 2), ("squared", 2), ("cubic", 3), ("cu", 3), ("cubed", 3)):
        if word in words:
            words.remove(word)
            power = value
    word = " ".join(words)
    unit = _UNITS.get(word) or _UNITS.get(word.removesuffix("s")) or Unit()
    if power == 1 or not unit.dimension:
        return unit
    # A litre is a cubic decimetre, and both ways of naming a volume are converted.
    if unit.dimension == "length" and power == 3:
        return Unit("volume", unit.factor**3 * 1000)
    return Unit(f"{unit.dimension}^{power}", unit.factor**power)

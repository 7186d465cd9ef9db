r"""Units at the end of an answer: dropped where one side has none, converted where both name one.

Words that are no known measure ("5 apples") say what is counted and are dropped. What is neither a known measure nor
plain words stays where it is: ``5\text{!}`` and ``5\text{k}`` are other numbers than 5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from grpo.rewards.math_unit_words import changes_number

_TABLE = {
    "length": "m meter metre 1; mm millimeter millimetre 1/1000; cm centimeter centimetre 1/100; dm decimeter 1/10; "
    "km kilometer kilometre 1000; inch inche in 0.0254; foot feet ft 0.3048; yard yd 0.9144; mile mi 1609.344",
    "mass": "g gram gm 1; mg milligram 1/1000; kg kilogram kilos 1000; tonne 1000000; lb pound 453.59237; "
    "ounce oz 28.349523125",
    "time": "s sec second 1; ms millisecond 1/1000; min minute 60; h hr hour 3600; day 86400; week wk 604800",
    "volume": "l liter litre 1; ml milliliter millilitre 1/1000; cl 1/100; gallon gal 3.785411784",
    "dollars": "$ dollar usd buck 1; ¢ cent 1/100; penny pennie 1/100; dime 1/10; quarter 1/4; nickel 1/20",
    "euros": "€ euro eur 1",
    "pounds sterling": "£ gbp 1; pence 1/100",
    "angle": "° degree deg 1",
    "angle in radians": "rad radian 1",
    "speed": "mph 1397/3125; kmh kph 5/18",
    "months": "month 1; year yr 12",
    "temperature in C": "°c 1",
    "temperature in F": "°f 1",
    "force": "newton 1",
    "energy": "joule 1; kj kilojoule 1000; kwh 3600000",
    "power": "watt 1; kw kilowatt 1000",
    "voltage": "volt 1",
    "frequency": "hz hertz 1; khz kilohertz 1000",
    "pressure": "pa pascal 1; kpa kilopascal 1000",
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
_CAPITALS = {"N": "newton", "J": "joule", "W": "watt", "V": "volt", "L": "l"}
# Letters alone are units only as text: "3 m" without a mark may be three times m.
_PLAIN = "|".join(sorted((re.escape(name) for name in _UNITS if len(name) > 1), key=len, reverse=True))
_EXPONENT = r"\^\{?-?[1-3]\}?"
_POWER = rf"(?:{_EXPONENT})?"
# Each text is read in one way alone, or reading could take exponentially long.
_GROUP = rf"\\text\s*\{{[^{{}}\d,]*(?:{_EXPONENT}\s*)?\}}{_POWER}"
_MARKED = re.compile(rf"\s*({_GROUP}(?:\s*(?:[/*]\s*)?{_GROUP})*)$")
_MEASURE = rf"\s*(?:(?:sq|cu)\.? ?)?(?:{_PLAIN})s?{_POWER}(?:/(?:{_PLAIN}|[smhl])(?![a-zA-Z]){_POWER})?"
_THINGS = rf"(?: [a-zA-Z]{{3,}}|[a-zA-Z]{{4,}}){_POWER}"
_BARE = re.compile(rf"(?<=[\d}}%])((?:{_MEASURE}|{_THINGS})(?:[ /-][a-zA-Z'.]+)*{_POWER})$")
_DEGREES = re.compile(r"\^\{\\circ\}\s*(?:\\text\s*\{\s*)?([CF]?)\s*\}?$")
_MONEY = re.compile(r"^([-+]?)([$€£])([-+]?)\s*(?=[\d.\\(])|([$€£])$")
_OF_ANGLE = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_RAISED = re.compile(r"\^\{?(-?[1-3])\}?")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z'-]*(?: [a-zA-Z][a-zA-Z'-]*)*")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "log", "exp", "mod", "det", "gcd", "lcm", "max", "min"})
_SHAPES = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


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
    if not is_unit(unit):
        return text, None
    # A unit follows a quantity; after an operator, or a word, the text is no unit.
    if not body or body[-1] in "+-*/=^_,<>" or body.endswith(r"\text") or not re.search(r"\d|\\pi|\\sqrt|[a-z]$", body):
        return text, None
    return body, read_unit(unit)


def is_unit(text: str) -> bool:
    r"""Whether what follows a number is a measure, or words that leave the number as it is.

    >>> [is_unit(text) for text in (r"\text{ cm}^{2}", "red apples", "units squared", r"\text{!}", r"\text{k}")]
    [True, True, True, False, False]
    """
    parts = _parts(text)
    return len(parts) <= 3 and all(_is_measure(part) or _is_words(part) for part in parts)


def read_unit(text: str) -> Unit:
    """The unit that ``text`` names, with powers and quotients of known ones; of further words the first counts."""
    parts = _parts(text)
    units = [_measure(part) for part in parts]
    if len(units) == 1:
        return units[0] if units[0].dimension else _measure(parts[0].split()[0])
    if any(not unit.dimension for unit in units) or len(units) > 2:
        return Unit()
    return _speed(units[0], units[1])


def _parts(text: str) -> list[str]:
    """What stands around ``per`` and ``/``, without marks of text."""
    name = re.sub(r"\\text\s*\{([^{}]*(?:\{[^{}]*\})?[^{}]*)\}", r" \1 ", text)
    name = re.sub(r"\(([a-zA-Z' -]+)\)", r" \1 ", name)
    name = re.sub(r"\s+(?=\^)", "", name.replace(".", " ").replace("*", " "))
    return [" ".join(part.split()) for part in re.split(r"/|\bper\b", name)]


def _is_measure(name: str) -> bool:
    """A known measure or ``units``, with its power, or several measures in a row (``kg m``)."""
    words, _ = _without_power(name)
    return bool(words) and all(_named(word).dimension or word in ("unit", "units") for word in words)


def _is_words(name: str) -> bool:
    words = _WORDS.fullmatch(name)
    if words is None or name == "MM" or not any(len(word) > 1 for word in name.split()):
        return False
    return not any(len(word) == 1 and word != "a" for word in name.split()) and not changes_number(name)


def _speed(upper: Unit, lower: Unit) -> Unit:
    factor = upper.factor / lower.factor
    together = f"{upper.dimension}/{lower.dimension}"
    return Unit("speed" if together == "length/time" else together, factor)


def _without_power(name: str) -> tuple[list[str], int]:
    """The words that name a unit and the power it is raised to, said by a sign or by a word."""
    signs = _RAISED.findall(name)
    words = _RAISED.sub(" ", name).split()
    shapes = [_SHAPES[word.lower()] for word in words if word.lower() in _SHAPES]
    powers = [*map(int, signs), *shapes]
    # Twice raised, or raised in the midst of it: nothing is said of that.
    if len(powers) > 1 or (signs and not name.endswith(("}", *"123"))):
        return [], 0
    return [word for word in words if word.lower() not in _SHAPES], (powers or [1])[0]


def _named(word: str) -> Unit:
    if len(word) == 1 and word.isupper():
        return _UNITS[_CAPITALS[word]] if word in _CAPITALS else Unit()
    if word == "MM":  # millions
        return Unit()
    return _UNITS.get(word.lower()) or _UNITS.get(word.lower().removesuffix("s")) or Unit()


def _measure(name: str) -> Unit:
    words, power = _without_power(name)
    unit = _named(words[0]) if len(words) == 1 else Unit()
    if power == 1 or not unit.dimension:
        return unit
    if power < 1:
        return Unit()
    # A litre is a cubic decimetre, and both ways of naming a volume are converted.
    if unit.dimension == "length" and power == 3:
        return Unit("volume", unit.factor**3 * 1000)
    return Unit(f"{unit.dimension}^{power}", unit.factor**power)

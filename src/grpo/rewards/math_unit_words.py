"""Words after a number that make it another number, and so are no unit: ``5 thousand``, ``5 halves``."""

from __future__ import annotations

import re

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "dozen score gross lakh crore grand thou mil mio mln mn bn tn k kk mega giga milli micro nano "
    "zillion gazillion quadrillion quintillion milliard billiard myriad decade century infinity infinite imaginary hex "
    "hexadecimal octal binary"
)
_PARTS = (
    "half halves third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth hundredth thousandth "
    "millionth billionth percent pct permille permil mille ppm ppb bp bps"
)
_OPERATIONS = (
    "plus minus divided multiplied by squared cubed doubled tripled halved quadrupled double triple twice thrice "
    "factorial power root exponent mod modulo base choose negative negated below reciprocal inverse recurring "
    "repeating repeated periodic raised"
)
_TAKEN_BACK = (
    "or and not nor either neither wrong maybe than except but instead rather incorrect false "
    "untrue invalid impossible no nope never none cannot rejected refuted unknown undefined unsure doubtful too "
    "perhaps possibly"
)
_CHANGING = frozenset(" ".join((_NUMBERS, _PARTS, _OPERATIONS, _TAKEN_BACK)).split())
_IN_CONTEXT = re.compile(
    # "5 times" counts; what is multiplied follows, unless it is a rate or a comparison
    r"\btimes\b(?! *$)(?! (?:as|per|each|every|more|less|in|on|larger|greater|bigger|longer|faster|older)\b)"
    r"(?! an? [a-z]{2})"
    r"|\bover [a-z]"  # "5 left over" counts, "5 over x" is a fraction
    r"|\b(?:square|cubic|cube)$"
    r"|\bpercentage\b|\b(?:basis|base) points?\b"
    r"|\bkilo$|[a-z]fold\b|n['’]t\b"
)


def changes_number(words: str) -> bool:
    """Whether a number followed by these words may be another number.

    >>> [changes_number(words) for words in ("times", "times six", "more apples", "more than that", "hundreds")]
    [False, True, False, True, True]
    """
    words = words.lower()
    found = re.findall("[a-z]+", words)
    forms = {
        word
        for each in found
        for word in (each, each.removesuffix("s"), each.removesuffix("es"), re.sub("ies$", "y", each))
    }
    return bool(forms & _CHANGING) or _IN_CONTEXT.search(words) is not None

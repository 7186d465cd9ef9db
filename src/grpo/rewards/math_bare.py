r"""An expression without what changes nothing about it: a unit, a name, ``+0``, ``1`` as a factor, ``^1``, ``05``.

What was asked is still what was asked with any of these around it.
"""

from __future__ import annotations

import re

from grpo.rewards.math_parts import split_label
from grpo.rewards.math_text import closing
from grpo.rewards.math_units import split_unit

_HALF = r"\^\{(?:0?\.5|1/2|\\frac\{1\}\{2\})\}"
_END = r"(?![\w.!^({\\])"
_TRIVIAL = tuple(
    (re.compile(pattern, re.ASCII), to)
    for pattern, to in (
        (r"(?<![\w.])0+(?=\d)", ""),
        (r"(?<=\d)\.0*(?!\d)", ""),
        (r"(\.\d*[1-9])0+(?!\d)", r"\1"),
        (r"\^\{\+?1\}", ""),
        (r"\^\{\+", "^{"),
        (rf"(?<![\w.])(\d+|[a-zA-Z]){_HALF}", r"\\sqrt{\1}"),
        (rf"\(([^()]*)\){_HALF}", r"\\sqrt{\1}"),
        (r"\(-(\w+)\)\^\{(\d*[02468])\}", r"\1^{\2}"),
        (rf"[-+]0{_END}", ""),
        (r"(?<![\w.^)}])0\+", ""),
        (rf"[*/]1{_END}", ""),
        (r"(?<![\w.^)}])1\*", ""),
        (r"(?<![\w.^)}\\])1(?=[a-zA-Z(]|\\(?:sqrt|pi|sin|cos|tan|ln|log)(?![a-zA-Z]))", ""),
    )
)
_OVER_ONE = re.compile(r"\\frac\{")
_MOST_LAYERS = 6


def bare(text: str) -> str:
    r"""The expression alone, of an answer in canonical spelling.

    >>> [bare(text) for text in (r"y=4!\text{ units}", r"\{04.0!\}", r"\frac{2x+3x}{1}+0", r"1\sqrt{50}")]
    ['4!', '4!', '2x+3x', '\\sqrt{50}']
    """
    for _ in range(_MOST_LAYERS):
        before = text
        text = trimmed(_opened(split_unit(split_label(text)[1])[0]))
        if text == before:
            break
    return text


def trimmed(text: str) -> str:
    """Without what changes no value, wherever it stands in the text."""
    for pattern, to in _TRIVIAL:
        text = pattern.sub(to, text)
    return _not_over_one(text)


def _opened(text: str) -> str:
    """Without braces of a set of one, and brackets around the whole."""
    if text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1 and "," not in text:
        return text[2:-2].strip()
    if text[:1] in ("(", "{", "[") and closing(text, 0) == len(text) - 1 and "," not in text:
        return text[1:-1].strip()
    return text


def _not_over_one(text: str) -> str:
    start = 0
    while (found := _OVER_ONE.search(text, start)) is not None:
        start = found.end()
        end = closing(text, start - 1)
        if end is not None and text.startswith("{1}", end + 1):
            text = f"{text[: found.start()]}({text[start:end]}){text[end + 4 :]}"
            start = found.start()
    return text

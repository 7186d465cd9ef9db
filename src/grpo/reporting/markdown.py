"""Pieces of Markdown, and numbers as they are read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from grpo.answer_metrics import Estimate

NOTHING = "-"

_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_PLAIN_WORDS = re.compile("[A-Za-z0-9]+(?:[ ._+-][A-Za-z0-9]+)*")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are text, the rest numbers."""
    marks = [":--" if column < left else "--:" for column in range(len(header))]
    lines = [header, marks, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def one_line(text: str) -> str:
    """Text without line ends and without characters that show as nothing or turn what follows around."""
    return "".join(map(_visible, _LINE_END.sub("⏎", text)))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    # Cc holds the tab, Zs other widths of space; what is left are controls, marks of direction and half characters.
    return " " if character == "\t" or unicodedata.category(character) == "Zs" else "\N{REPLACEMENT CHARACTER}"


def plain(text: str) -> str:
    """A name from the data in running text: as it is where it is plain words, else as code."""
    return text if _PLAIN_WORDS.fullmatch(text) else code(text)


def code(text: str, longest: int = 120, keep_end: bool = False) -> str:
    """Text of a model or a problem on one line, shown as it is and never read as markup."""
    flat = one_line(text)
    if len(flat) > longest:
        flat = "…" + flat[-longest:] if keep_end else flat[:longest] + "…"
    if not flat.strip():
        return "(white space)" if flat else "(empty)"
    if "\\|" in flat:
        # Renderers disagree on whether the `\\|` that a table makes of it ends the cell.
        return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in flat)}</code>"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    gap = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{gap}{flat}{gap}{fence}"


def share(value: float | None) -> str:
    """0.4567 as 45.7%."""
    return NOTHING if value is None else f"{100 * value:.1f}%"


def number(value: float | None, places: int = 2) -> str:
    """A plain number with ``places`` decimals."""
    return NOTHING if value is None else f"{value:.{places}f}"


def estimate(one: Estimate, is_share: bool = True) -> str:
    """``45.7% [40.1, 51.2]``, or without the interval where none is claimed."""
    shown = share(one.value) if is_share else number(one.value)
    return shown + _interval(one, is_share, sign="")


def difference(one: Estimate, is_share: bool = True, unit: str = "") -> str:
    """``+12.3 [+8.0, +16.5]`` in percentage points, or in the metric's own unit."""
    if one.value is None:
        return NOTHING
    return _signed(one.value, is_share) + unit + _interval(one, is_share, sign="+")


def _interval(one: Estimate, is_share: bool, sign: str) -> str:
    if one.low is None or one.high is None:
        return ""
    low, high = (_signed(part, is_share, sign) for part in (one.low, one.high))
    return f" [{low}, {high}]"


def _signed(value: float, is_share: bool, sign: str = "+") -> str:
    places = 1 if is_share else 2
    rounded = round(100 * value if is_share else value, places) + 0.0
    return f"{rounded:{sign}.{places}f}"
